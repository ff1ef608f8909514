"""The hard promise: what is held and loaded never exceeds the budget, and nobody waits for ever."""

import os
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from residency_sources import CountingSource, holding, run_threads, sources, use

from t2n_hf.errors import ConfigError, StorageError
from t2n_hf.residency import Claim, ResidencyStrategy, TensorResidencyPool, room
from t2n_hf.residency.loading import Loading

CPU = torch.device("cpu")
LEARNED = ResidencyStrategy.LEARNED


def strict(max_bytes, **options):
    options.setdefault("strategy", LEARNED)
    return TensorResidencyPool(max_bytes, strict=True, **options)


class together:
    """Lease several values at once, as the hooks of a module do."""

    def __init__(self, pool, *wanted, nested=0):
        self.pool, self.wanted, self.claim = pool, [(source, CPU) for source in wanted], Claim(nested=nested)

    def __enter__(self):
        self.pool.open(self.claim, self.wanted)
        return [entry.value for entry in self.claim.entries]

    def __exit__(self, *_):
        self.pool.release(self.claim)


@pytest.mark.parametrize("strategy", [LEARNED, ResidencyStrategy.LRU])
@pytest.mark.parametrize("ahead", [0, 100], ids=["no readahead", "readahead"])
def test_four_threads_never_hold_and_load_more_than_the_budget(strategy, ahead):
    pool = strict(64 * 4, strategy=strategy, max_workers=2, readahead_nbytes=ahead)
    weights = [CountingSource(f"w{i}", 32 + 8 * (i % 5), fill=i, delay_s=0.0002 * (i % 3)) for i in range(16)]

    def work(seed):
        chance = random.Random(seed)
        for _ in range(12):
            for place in range(0, 16, 2):
                pair = weights[place : place + 2]
                with together(pool, *pair) as values:
                    assert [v.unique().tolist() for v in values] == [[s.fill] for s in pair]
                    if chance.random() < 0.3:
                        time.sleep(0.0003)
                    assert pool.used_bytes <= 256
                if chance.random() < 0.2:
                    assert pool.resolve(weights[chance.randrange(16)]).numel()

    run_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
    assert 0 < pool.peak_bytes <= 256
    assert pool.lease_count == 0
    pool.close()


def test_a_lease_waits_for_the_room_that_another_thread_has():
    pool = strict(10)
    a, b = CountingSource("a", 6), CountingSource("b", 6)
    done = threading.Event()
    thread = holding(pool, a, done)
    opened = []
    waiter = threading.Thread(target=lambda: opened.append(use(pool, b)))
    waiter.start()
    time.sleep(0.1)
    assert not opened
    assert b.reads == 0
    done.set()
    waiter.join(60)
    thread.join(60)
    assert len(opened) == 1
    assert pool.peak_bytes == 6
    pool.close()


@pytest.mark.parametrize("way", ["resolve", "prefetch"])
def test_who_holds_a_lease_waits_for_a_read_that_has_room_and_is_about_to_begin(monkeypatch, way):
    pool = strict(10)
    a, b, c = CountingSource("a", 6), CountingSource("b", 6), CountingSource("c", 4)
    about, go_on = threading.Event(), threading.Event()
    read = Loading._read_into

    def late(self, entry, source):
        if source is a:
            about.set()
            assert go_on.wait(60)
        return read(self, entry, source)

    monkeypatch.setattr(Loading, "_read_into", late)
    resolving = threading.Thread(target=lambda: pool.resolve(a) if way == "resolve" else pool.prefetch(a).wait())
    resolving.start()
    assert about.wait(60)
    threading.Timer(0.2, go_on.set).start()
    with pool.acquire(c), pool.acquire(b) as value:
        assert value.numel()
    resolving.join(60)
    assert pool.peak_bytes == 10
    pool.close()


def test_time_in_which_the_process_is_stopped_is_no_waiting(monkeypatch):
    seconds = [0.0, 0.05, 100.0, *(100.05 + 0.05 * tick for tick in range(250))]
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=iter(seconds).__next__))
    patience = room.Patience()
    assert 190 < [patience.is_over(1) for _ in seconds].index(True) < 210


def test_two_threads_that_share_a_value_do_not_wait_for_each_other():
    pool = strict(10)
    a = CountingSource("a", 8)
    done = threading.Event()
    thread = holding(pool, a, done)
    assert use(pool, a) is not None
    done.set()
    thread.join(60)
    pool.close()


def test_leases_taken_together_cannot_lock_two_threads_up():
    pool = strict(10)
    a, b, c, d = sources(4)

    def work(*wanted):
        for _ in range(60):
            with together(pool, *wanted):
                time.sleep(0.0001)

    run_threads(lambda: work(a, b), lambda: work(b, c), lambda: work(d, a))
    assert pool.peak_bytes <= 10
    pool.close()


def test_a_thread_that_holds_leases_goes_on_rather_than_wait(monkeypatch):
    monkeypatch.setattr(room, "_PATIENCE_S", 100)  # who waits is found to hang
    pool = strict(8)
    a, b, c, d = sources(4)
    both = threading.Barrier(2)

    def work(outer, inner):
        with pool.acquire(outer):
            both.wait(60)
            with pool.acquire(inner):  # 12 or 16 bytes: nobody could go on otherwise
                both.wait(60)

    run_threads(lambda: work(a, b), lambda: work(c, d))
    assert pool.resident_bytes <= 8
    pool.close()


def test_room_that_is_put_aside_for_inner_leases_holds_the_budget():
    pool = strict(12)
    weights = sources(6)

    def work(seed):
        outer, *inner = weights[seed::2]
        for _ in range(40):
            with together(pool, outer, nested=4):
                for source in inner:
                    with together(pool, source):
                        time.sleep(0.0001)

    run_threads(lambda: work(0), lambda: work(1), lambda: work(0))
    assert pool.peak_bytes <= 12
    pool.close()


def test_many_small_leases_do_not_starve_a_large_one():
    pool = strict(10)
    small, large = sources(3), CountingSource("large", 10)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            for source in small:
                with pool.acquire(source):
                    time.sleep(0.0002)

    def wait_for_large():
        try:
            for _ in range(10):
                use(pool, large)
        finally:
            stop.set()

    run_threads(work, work, work, wait_for_large)
    assert pool.peak_bytes <= 10
    pool.close()


def test_a_value_larger_than_the_budget_is_loaded_when_nobody_else_holds_any():
    pool = strict(4)
    a, large = CountingSource("a", 4), CountingSource("large", 100)
    done = threading.Event()
    thread = holding(pool, a, done)
    opened = []
    waiter = threading.Thread(target=lambda: opened.append(use(pool, large).numel()))
    waiter.start()
    time.sleep(0.1)
    assert not opened
    done.set()
    waiter.join(60)
    thread.join(60)
    assert opened == [100]
    assert pool.resident_bytes == 0
    pool.close()


def test_a_thread_that_ended_with_a_lease_does_not_keep_others_waiting():
    pool = strict(4)
    a, b = sources(2)
    lost = pool.acquire(a)
    thread = threading.Thread(target=lost.open)
    thread.start()
    thread.join()
    assert use(pool, b) is not None
    lost.release()
    assert pool.resident_bytes <= 4
    pool.close()


def test_whoever_waits_asks_for_what_is_left_over_to_be_released():
    pool = strict(4)
    a, b = sources(2)
    opened, done = threading.Event(), threading.Event()
    left = pool.acquire(a)
    thread = threading.Thread(target=lambda: (left.open(), opened.set(), done.wait(60)))
    thread.start()
    assert opened.wait(60)
    pool.call_before_wait(left.release)
    assert use(pool, b) is not None
    assert pool.peak_bytes == 4
    done.set()
    thread.join(60)
    pool.close()


def test_nobody_waits_for_ever_for_a_thread_that_waits_for_him(monkeypatch):
    monkeypatch.setattr(room, "_PATIENCE_S", 0.2)
    pool = strict(4)
    a, b = sources(2)
    with pool.acquire(a):
        helper = threading.Thread(target=lambda: use(pool, b))
        helper.start()
        helper.join(60)
        assert not helper.is_alive()
    pool.close()


@pytest.mark.parametrize("where", ["load", "_read_into"])
def test_an_interrupt_before_a_read_leaves_nothing_that_others_wait_for(where, monkeypatch):
    pool = strict(4)
    (a,) = sources(1)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Loading, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            use(pool, a)
    assert pool.lease_count == pool.used_bytes == 0
    with monkeypatch.context() as patched:
        patched.setattr(Loading, "_read_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.resolve(a)
    assert use(pool, a) is not None
    pool.close()


def test_an_interrupted_wait_leaves_nothing_behind():
    pool = strict(4)
    a, b = sources(2)
    done = threading.Event()
    thread = holding(pool, a, done)

    def interrupt():
        raise KeyboardInterrupt

    pool.call_before_wait(interrupt)
    with pytest.raises(KeyboardInterrupt):
        use(pool, b)
    with pytest.raises(KeyboardInterrupt):
        pool.resolve(b)
    pool.call_before_wait(None)
    assert pool.lease_count == 1
    done.set()
    thread.join(60)
    assert use(pool, b) is not None
    assert pool.used_bytes == 4
    pool.close()


def test_a_failed_read_among_several_leases_leaves_none_open():
    pool = strict(12)
    a, b, c = sources(3)
    b.failures = 1
    with pytest.raises(StorageError, match="w1"), together(pool, a, b, c):
        pass
    assert pool.lease_count == 0
    assert pool.used_bytes <= 12
    with together(pool, a, b, c) as values:
        assert [v.unique().tolist() for v in values] == [[0], [1], [2]]
    pool.close()
    assert (a.reads, b.reads, c.reads) == (1, 2, 1)


def test_a_prefetch_waits_for_room_and_who_needs_it_does_not_wait_for_the_prefetch():
    pool = strict(6)
    a, b = sources(2)
    with pool.acquire(a):
        handle = pool.prefetch(b)
        time.sleep(0.1)
        assert b.reads == 0
        assert not handle.done()
        assert pool.used_bytes == 4
        # This thread holds a lease: if it waited for the worker, which waits for the lease, both would wait for ever.
        assert handle.wait().unique().tolist() == [1]
    pool.close()


def test_a_prefetch_is_read_when_there_is_room():
    pool = strict(6)
    a, b = sources(2)
    with pool.acquire(a):
        handle = pool.prefetch(b)
    for _ in range(2000):
        if handle.done():
            break
        time.sleep(0.01)
    assert handle.done()
    assert pool.peak_bytes == 4
    pool.close()


def test_fixed_cannot_be_strict():
    with pytest.raises(ConfigError, match="FIXED"):
        TensorResidencyPool(8, strategy=ResidencyStrategy.FIXED, strict=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_without_the_loads_and_leases_of_other_threads():
    pool = strict(12)
    a, slow, b = sources(3)
    slow.gate, done = threading.Event(), threading.Event()
    thread = holding(pool, a, done)
    handle = pool.prefetch(slow)
    assert slow.started.wait(60)
    child = os.fork()
    if child == 0:
        slow.gate = None
        good = use(pool, slow).unique().tolist() == [1] and use(pool, b).unique().tolist() == [2]
        good = good and pool.prefetch(a).wait() is not None and pool.used_bytes <= 12
        os._exit(0 if good else 1)
    slow.gate.set()
    assert os.waitpid(child, 0)[1] == 0
    assert handle.wait().unique().tolist() == [1]
    done.set()
    thread.join(60)
    pool.close()


def test_flush_and_evict_do_not_wait_for_a_prefetch_that_waits_for_this_thread():
    pool = strict(6)
    a, b = sources(2)
    with pool.acquire(a):
        handle = pool.prefetch(b)
        pool.flush()
        assert not handle.done()
        pool.evict(b)
        assert handle.done()
        assert handle.wait().unique().tolist() == [1]  # it is loaded after all
    pool.close()
