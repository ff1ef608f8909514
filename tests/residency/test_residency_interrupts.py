"""An interrupt, wherever it comes, leaves nothing that other threads wait for."""

import threading
from pathlib import Path

import pytest
import torch
from interrupts import interrupted, needs_known_points
from residency_sources import WritableSource, use

import t2n_hf.residency
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool

ROOM = str(Path(t2n_hf.residency.__file__).parent)


def writing_back(pool, a, b):
    pool.flush()
    pool.evict(a)


def evicting(pool, a, b):
    pool.resolve(b)
    pool.resolve(a)


def hastening(pool, a, b):
    pool.prefetch(b).wait()


@needs_known_points
@pytest.mark.parametrize("does", [writing_back, evicting, hastening])
def test_wherever_an_interrupt_comes_others_go_on(does):
    at = 0
    while True:
        at += 1
        pool = TensorResidencyPool(8, strategy=ResidencyStrategy.LEARNED, strict=True)
        a, b = WritableSource("a", torch.zeros(2)), WritableSource("b", torch.zeros(2))
        with pool.acquire(a, mode="read_write") as value:
            value.fill_(at)
        where = interrupted(lambda pool=pool, a=a, b=b: does(pool, a, b), at, ROOM)
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


@needs_known_points
@pytest.mark.parametrize("mode", ["read", "read_write"])
def test_a_lease_whose_release_was_interrupted_can_be_released_again(mode):
    at = 0
    while True:
        at += 1
        pool = TensorResidencyPool(8, strategy=ResidencyStrategy.LEARNED, strict=True)
        a = WritableSource("a", torch.zeros(2))
        lease = pool.acquire(a, mode=mode)
        lease.open()
        where = interrupted(lease.release, at, ROOM)
        if where is None:
            break
        lease.release()
        assert (pool.lease_count, lease.is_open) == (0, False), where
        pool.close()
        assert pool.used_bytes == 0, where
    assert at > 20
