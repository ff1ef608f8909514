"""Room that several threads ask for at once is counted once for each value, and for no value less."""

import threading
import time

import torch
from residency_sources import WritableSource, holding, sources, use

from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool
from t2n_hf.residency.claims import Claims


def strict(max_bytes):
    return TensorResidencyPool(max_bytes, strict=True)


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_claim_and_a_worker_put_bytes_aside_for_a_value_once(monkeypatch):
    pool = strict(8)
    changed, (clean, wanted) = WritableSource("w", torch.zeros(1)), sources(2)
    with pool.acquire(changed, mode="read_write") as value:
        value.fill_(1)
    use(pool, clean)
    begun, gate, store, load_missing = threading.Event(), threading.Event(), changed.store, Claims.load_missing
    changed.store = lambda value: (begun.set(), gate.wait(60), store(value))
    handle = pool.prefetch(wanted)
    assert begun.wait(60)

    def after_the_worker(self, claim, missing):
        gate.set()
        wait_until(handle.done)
        load_missing(self, claim, missing)

    monkeypatch.setattr(Claims, "load_missing", after_the_worker)
    use(pool, wanted)
    assert pool.used_bytes == pool.resident_bytes
    assert pool.peak_bytes <= 8
    pool.close()


def test_a_lease_of_a_newer_value_waits_for_room_beside_the_stale_one():
    pool = strict(8)
    a, b = sources(2)
    a.version, done = 0, threading.Event()
    holders = [holding(pool, source, done) for source in (a, b)]
    a.version = 1
    thread = threading.Thread(target=use, args=(pool, a))
    thread.start()
    wait_until(lambda: pool._room._asleep or not thread.is_alive())
    done.set()
    for one in (*holders, thread):
        one.join(60)
    assert pool.peak_bytes == 8
    pool.close()


def test_a_value_that_is_prefetched_before_it_is_read_ahead_keeps_no_room_from_leases():
    pool = TensorResidencyPool(8, strategy=ResidencyStrategy.LEARNED, strict=True, readahead_nbytes=4)
    slow, ahead, leased = sources(3)
    slow.gate = threading.Event()
    handles = [pool.prefetch(slow)]
    assert slow.started.wait(60)
    with pool._room.lock:
        pool._ahead._queue((ahead.key, torch.device("cpu")), ahead, 0)
    handles.append(pool.prefetch(ahead))
    assert use(pool, leased).unique().tolist() == [2]
    assert pool.peak_bytes == 8
    slow.gate.set()
    assert [handle.wait().unique().tolist() for handle in handles] == [[0], [1]]
    pool.close()


def test_room_for_what_was_skipped_before_it_is_read_ahead_is_given_back(monkeypatch):
    pool = TensorResidencyPool(8, strategy=ResidencyStrategy.LEARNED, strict=True, readahead_nbytes=4)
    slow, ahead, leased = sources(3)
    slow.gate = threading.Event()
    handle = pool.prefetch(slow)
    assert slow.started.wait(60)
    with pool._room.lock:
        pool._ahead._queue((ahead.key, torch.device("cpu")), ahead, 0)
    monkeypatch.setattr(pool._table.policy, "distance", lambda key: 5)
    for _ in range(2):
        use(pool, leased)
    assert pool.peak_bytes == 8
    slow.gate.set()
    assert handle.wait() is not None
    assert use(pool, ahead).unique().tolist() == [1]
    pool.close()
