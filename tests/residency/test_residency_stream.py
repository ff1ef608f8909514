"""What there is no room for passes through a few slots, piece by piece, and what is kept stays."""

import threading
from contextlib import contextmanager, suppress

import pytest
import torch
from residency_sources import run_threads

from t2n_hf.errors import StorageError
from t2n_hf.residency import Claim, ResidencyStrategy, TensorResidencyPool, stream

CPU = torch.device("cpu")
SLOT = 64
PIECES = 10  # of one value


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(stream, "_SLOT_NBYTES", SLOT)
    monkeypatch.setattr(stream, "STREAM_NBYTES", SLOT * 4)
    monkeypatch.setattr(stream, "_LEAST_BUDGET", SLOT * 8)


class SteppingSource:
    """Bytes `number`, 0, 1, 2...: whole or in pieces of a slot. Counts what is read, fails as told."""

    def __init__(self, number, count=PIECES):
        self.key, self.version, self.count = f"w{number}", 0, count
        self.nbytes = SLOT * count
        self.values = torch.arange(self.nbytes).remainder(251).add(number).to(torch.uint8)
        self.whole = self.pieces = self.failures = 0
        self.gate = None
        self.reading = threading.Event()

    def load(self, device):
        self.whole += 1
        return self.values.clone()

    def steps(self, slot_nbytes):
        assert slot_nbytes == SLOT
        return self

    def read(self, at, slot):
        self.pieces += 1
        self.reading.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.failures:
            self.failures -= 1
            raise StorageError("weights.safetensors is truncated")
        return slot.copy_(self.values[at * SLOT : (at + 1) * SLOT])


def pool_of(budget, **options):
    return TensorResidencyPool(
        budget, strategy=ResidencyStrategy.LEARNED, readahead_nbytes=SLOT * PIECES, strict=True, **options
    )


@contextmanager
def leased(pool, source):
    """A lease as the hooks of modules open it: it may turn out to hold nothing."""
    claim = Claim()
    pool.open(claim, [(source, CPU)])
    try:
        yield
    finally:
        pool.release(claim)


def used(pool, source):
    """The bytes of a value as a module would use it: from its pieces when it passes, else from the pool."""
    with leased(pool, source):
        parts = []
        if pool.stream(source, CPU, lambda rows: parts.append(rows.clone())):
            return torch.cat(parts)
        return pool.resolve(source)


def pass_over(pool, sources):
    for source in sources:
        assert torch.equal(used(pool, source), source.values)


def learned(budget, count=8):
    """A pool that has seen two passes over `count` values."""
    pool, sources = pool_of(budget), [SteppingSource(number) for number in range(count)]
    pass_over(pool, sources)
    pass_over(pool, sources)
    pool.flush()
    return pool, sources


def test_what_is_kept_stays_and_the_rest_passes():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    kept = [source for source in sources if pool.is_resident(source)]
    assert len(kept) == 3  # the slots take the room of a part of the fourth
    before = [source.whole for source in sources]
    for _ in range(3):
        pass_over(pool, sources)
    assert [source.whole for source in sources] == before
    assert [source for source in sources if pool.is_resident(source)] == kept
    assert all(source.pieces for source in sources if source not in kept)
    pool.close()


def test_pieces_are_read_before_they_are_asked_for_and_each_only_once():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    passing = [source for source in sources if not pool.is_resident(source)]
    for source in sources:
        source.pieces = 0
        source.reading.clear()
    pass_over(pool, sources)
    assert passing[0].reading.wait(60)  # for the next pass
    pass_over(pool, sources)
    # What was read ahead of the first pass and of a third one is in the slots.
    assert abs(sum(source.pieces for source in passing) - 2 * PIECES * len(passing)) <= 4
    pool.close()


def test_slots_count_and_the_budget_holds():
    budget = 4 * SLOT * PIECES
    pool, sources = learned(budget)
    pass_over(pool, sources)
    assert pool.used_bytes == pool.resident_bytes + 4 * SLOT
    assert pool.peak_bytes <= budget
    pool.close()
    assert pool.used_bytes == 0


def test_slots_are_given_back_to_a_value_that_needs_their_room():
    budget = 2 * SLOT * PIECES
    pool, sources = learned(budget)
    pass_over(pool, sources)
    large = SteppingSource(99, count=2 * PIECES)
    with pool.acquire(large) as value:
        assert torch.equal(value, large.values)
        assert pool.used_bytes <= budget
    pass_over(pool, sources)
    pool.close()


def test_another_order_is_followed():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    for order in (sources[::-1], sources[3:] + sources[:3], sources[::2], [sources[6]] * 3 + [sources[7]] * 3):
        pass_over(pool, order)
    pool.close()


def test_a_value_that_changed_after_it_was_read_ahead_is_read_again():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    changed = next(source for source in sources if not pool.is_resident(source))
    changed.reading.clear()
    pass_over(pool, sources)
    changed.reading.wait(60)
    changed.values = changed.values + 1
    changed.version += 1
    pass_over(pool, sources)
    pool.close()


def test_a_failed_piece_has_the_value_loaded_and_later_ones_pass_again():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    broken = [source for source in sources if not pool.is_resident(source)][2]
    broken.failures, before = 1, broken.whole
    pass_over(pool, sources)
    pass_over(pool, sources)
    assert broken.whole == before + 1
    pass_over(pool, sources)
    pool.close()


def test_an_error_of_the_user_ends_the_use_and_nothing_else():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    passing = next(source for source in sources if not pool.is_resident(source))

    def fail(rows):
        raise ZeroDivisionError

    for _ in range(20):  # no slot is lost
        with pytest.raises(ZeroDivisionError):
            pool.stream(passing, CPU, fail)
    pass_over(pool, sources)
    pool.close()


def test_interrupts_lose_no_slot(monkeypatch):
    pool, sources = learned(budget=4 * SLOT * PIECES)
    passing = next(source for source in sources if not pool.is_resident(source))
    read_whole, interrupts = stream.Stream._read, []

    def interrupted(self, read):
        if threading.current_thread() is threading.main_thread():
            interrupts.append(read)
            raise KeyboardInterrupt
        read_whole(self, read)

    with monkeypatch.context() as patched:
        patched.setattr(stream.Stream, "_read", interrupted)
        for _ in range(40):
            with suppress(KeyboardInterrupt):
                used(pool, passing)
    assert len(interrupts) > 4
    pass_over(pool, sources)
    pool.close()


def test_new_slots_do_not_wait_for_a_read_into_older_ones():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    slow, other = [source for source in sources if not pool.is_resident(source)][1:3]
    slow.gate = threading.Event()
    slow.reading.clear()
    pass_over(pool, sources[: sources.index(slow)])
    assert slow.reading.wait(60)  # the thread of the stream is in the middle of it
    with pool._room.lock:
        assert pool._stream.give_up()
    timer = threading.Timer(10, slow.gate.set)
    timer.start()
    assert torch.equal(used(pool, other), other.values)
    assert not slow.gate.is_set()
    timer.cancel()
    slow.gate.set()
    pass_over(pool, sources)
    pool.close()


def test_what_is_never_asked_for_in_pieces_is_leased_and_read_ahead_again():
    pool, sources = pool_of(4 * SLOT * PIECES), [SteppingSource(number) for number in range(8)]
    unleased = 0
    for _ in range(8):
        for source in sources:
            with leased(pool, source):
                assert torch.equal(pool.resolve(source), source.values)
                unleased += not pool.lease_count
    assert unleased <= len(sources)  # each once, to find out
    assert not pool._stream._slots
    for _ in range(3):  # asked for at last, it passes from the next time on
        pass_over(pool, sources)
    assert pool._stream._slots
    pool.close()


def test_a_slow_read_that_was_given_up_does_not_spoil_what_follows():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    passing = [source for source in sources if not pool.is_resident(source)]
    slow = passing[1]
    for _ in range(3):
        slow.gate = threading.Event()
        slow.reading.clear()
        assert torch.equal(used(pool, passing[0]), passing[0].values)
        assert slow.reading.wait(60)  # the thread of the stream is in the middle of it
        timer = threading.Timer(0.02, slow.gate.set)
        timer.start()
        pass_over(pool, passing[2:])
        timer.join()
        pass_over(pool, sources)
    pool.close()


def test_threads_get_the_right_values():
    pool, sources = learned(budget=4 * SLOT * PIECES)
    run_threads(*[lambda: [pass_over(pool, sources) for _ in range(5)]] * 3)
    pass_over(pool, sources)
    pass_over(pool, sources)
    pool.close()


def test_nothing_passes_while_there_is_room_or_the_order_is_unknown_or_the_budget_is_small():
    for budget in (None, 100 * SLOT * PIECES, SLOT * 7):
        pool = TensorResidencyPool(budget, strategy=ResidencyStrategy.LEARNED, readahead_nbytes=SLOT)
        sources = [SteppingSource(number) for number in range(4)]
        for _ in range(3):
            for source in sources:
                with leased(pool, source):
                    assert torch.equal(pool.resolve(source), source.values)
                    assert not pool.stream(source, CPU, lambda rows: None)
        pool.close()
    pool, sources = pool_of(4 * SLOT * PIECES), [SteppingSource(number) for number in range(8)]
    for source in sources:
        with leased(pool, source):
            assert not pool.stream(source, CPU, lambda rows: None)
    pool.close()


@pytest.mark.parametrize("before", [1, 3], ids=["without slots", "with slots"])
def test_values_are_still_used_when_no_thread_can_be_started(before, monkeypatch):
    pool, sources = pool_of(4 * SLOT * PIECES), [SteppingSource(number) for number in range(8)]
    for _ in range(before):
        pass_over(pool, sources)
    pool._stream._threads, threads = None, pool._stream._threads
    if threads is not None:
        threads.shutdown()

    def refuse(*args, **options):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(stream.ThreadPoolExecutor, "submit", refuse)
        for _ in range(3):
            pass_over(pool, sources)
    for _ in range(3):
        pass_over(pool, sources)
    pool.close()


def test_what_is_used_once_makes_room_for_what_is_used_again_and_again():
    pool, sources = pool_of(4 * SLOT * PIECES), [SteppingSource(number) for number in range(6)]
    encoder, decoder = sources[:3], sources[3:]
    pass_over(pool, encoder)
    for _ in range(20):
        pass_over(pool, decoder)
    assert all(map(pool.is_resident, decoder))
    before = [(source.whole, source.pieces) for source in decoder]
    pass_over(pool, decoder)
    assert [(source.whole, source.pieces) for source in decoder] == before
    pass_over(pool, encoder)
    for _ in range(20):
        pass_over(pool, decoder)
    assert all(map(pool.is_resident, decoder))
    pool.close()
