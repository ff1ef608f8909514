"""An interrupt, wherever it comes, leaves nothing that other threads wait for."""

import dis
import sys
import threading
from pathlib import Path

import pytest
import torch
from residency_sources import WritableSource, use

import t2n_hf.residency
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool

ROOM = str(Path(t2n_hf.residency.__file__).parent)


class Interrupts:
    """Raises KeyboardInterrupt at the n-th point of the room at which CPython looks for signals."""

    LOOKS = ("RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX")

    def __init__(self, at):
        self.left, self.returned, self.where = at, False, None

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names, last = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}, "RESUME"

        def local(frame, event, _):
            nonlocal last
            if event == "opcode":
                # Python functions are called without a look afterwards.
                looks = last in self.LOOKS and not (self.returned and last == "CALL")
                self.returned, last = False, names.get(frame.f_lasti)
                if looks and self.where is None:
                    self.left -= 1
                    if not self.left:
                        self.where = (frame.f_code.co_name, frame.f_lineno)
                        raise KeyboardInterrupt
            elif event == "return":
                self.returned = True
            return local

        return local


def interrupted(function, at):
    interrupts, before = Interrupts(at), sys.gettrace()
    sys.settrace(interrupts)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupts.where


def writing_back(pool, a, b):
    pool.flush()
    pool.evict(a)


def evicting(pool, a, b):
    pool.resolve(b)
    pool.resolve(a)


def hastening(pool, a, b):
    pool.prefetch(b).wait()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="where CPython looks for signals differs by version")
@pytest.mark.parametrize("does", [writing_back, evicting, hastening])
def test_wherever_an_interrupt_comes_others_go_on(does):
    at = 0
    while True:
        at += 1
        pool = TensorResidencyPool(8, strategy=ResidencyStrategy.LEARNED, strict=True)
        a, b = WritableSource("a", torch.zeros(2)), WritableSource("b", torch.zeros(2))
        with pool.acquire(a, mode="read_write") as value:
            value.fill_(at)
        where = interrupted(lambda pool=pool, a=a, b=b: does(pool, a, b), at)
        if where is None:
            break
        others = lambda pool=pool, a=a, b=b: (use(pool, a), use(pool, b), pool.flush(), pool.evict(b))  # noqa: E731
        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), where
        assert a.stored.tolist() == [at, at], where
        assert (pool.lease_count, pool.peak_bytes) == (0, 8), where
        pool.close()
        assert pool.used_bytes == 0, where
    assert at > 20
