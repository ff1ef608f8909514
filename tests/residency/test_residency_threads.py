import contextlib
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from residency_sources import CountingSource, WritableSource, run_threads, sources, use

from t2n_hf.errors import ResidencyError, StorageError
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool

STRATEGIES = list(ResidencyStrategy)


def test_a_second_thread_waits_for_a_value_that_is_being_loaded():
    pool = TensorResidencyPool()
    (source,) = sources(1)
    source.gate = threading.Event()
    seen = []
    readers = [threading.Thread(target=lambda: seen.append(use(pool, source))) for _ in range(4)]
    for reader in readers:
        reader.start()
    assert source.started.wait(60)
    # Another value can be loaded meanwhile: nothing is read under the lock.
    assert use(pool, CountingSource("other")) is not None
    source.gate.set()
    for reader in readers:
        reader.join(60)
    assert source.reads == 1
    assert len(seen) == 4
    assert all(value is seen[0] for value in seen)
    pool.close()


def test_who_cannot_wait_for_a_queued_prefetch_loads_it_himself():
    pool = TensorResidencyPool(max_workers=1)
    slow, queued = sources(2)
    slow.gate = threading.Event()
    first, second = pool.prefetch(slow), pool.prefetch(queued)
    assert use(pool, queued) is second.wait()
    assert not first.done()
    slow.gate.set()
    assert first.wait() is use(pool, slow)
    pool.close()
    assert (slow.reads, queued.reads) == (1, 1)


@pytest.mark.parametrize("prefetched", [True, False], ids=["prefetched", "direct"])
def test_a_failed_load_is_reported_forgotten_and_tried_again(prefetched):
    pool = TensorResidencyPool(max_cached_bytes=8)
    (source,) = sources(1)
    source.failures = 1
    with pytest.raises(StorageError, match=r"weights.safetensors: tensor 'w0'"):
        _ = pool.prefetch(source).wait() if prefetched else use(pool, source)
    assert not pool.is_resident(source)
    assert use(pool, source) is not None
    assert pool.resident_bytes == 4
    pool.close()


def test_a_waiter_reads_again_when_the_load_he_waited_for_fails():
    pool = TensorResidencyPool()
    (source,) = sources(1)
    source.failures, source.gate = 1, threading.Event()
    handle = pool.prefetch(source)
    assert source.started.wait(60)
    timer = threading.Timer(0.05, source.gate.set)
    timer.start()
    assert use(pool, source) is not None
    with pytest.raises(StorageError):
        handle.wait()
    timer.join()
    pool.close()


def test_a_failed_load_unpins_and_other_errors_of_the_system_become_storage_errors():
    class Broken(CountingSource):
        def load(self, device):
            raise OSError(5, "Input/output error")

    pool = TensorResidencyPool()
    source = Broken("w")
    with pytest.raises(StorageError, match=r"w: cannot be read: .*Input/output error"):
        pool.pin(source).wait()
    assert not pool.is_pinned(source)
    pool.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_oversized_prefetch_reaches_its_caller_without_being_kept(strategy):
    pool = TensorResidencyPool(max_cached_bytes=8, strategy=strategy)
    small, large = CountingSource("small", 8), CountingSource("large", 100, fill=7)
    use(pool, small)
    handle = pool.prefetch(large)
    value = handle.wait()
    assert value.sum() == 700
    assert pool.is_resident(small)
    assert not pool.is_resident(large)
    assert use(pool, large) is value
    assert large.reads == 1
    assert not pool.is_resident(large)
    pool.close()


def test_an_oversized_value_that_is_pinned_is_kept():
    pool = TensorResidencyPool(max_cached_bytes=8)
    large = CountingSource("large", 100)
    pool.pin(large).wait()
    assert pool.is_resident(large)
    pool.close()
    assert pool.resident_bytes == 0


def test_a_prefetch_of_a_resident_value_is_done_at_once():
    pool = TensorResidencyPool()
    (source,) = sources(1)
    value = use(pool, source)
    handle = pool.prefetch(source)
    assert handle.done()
    assert handle.wait() is value
    pool.close()


def scan(pool, weights, depth, passes=3):
    seen = []
    handles = {}
    for _ in range(passes):
        for place, source in enumerate(weights):
            for ahead in weights[place + 1 : place + 1 + depth]:
                handles[ahead.key] = pool.prefetch(ahead)
            with pool.acquire(source) as value:
                handles.pop(source.key, None)
                seen.append(value.clone())
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefetching_slow_reads_gives_the_same_bits(strategy):
    for run in range(50):
        weights = [CountingSource(f"w{i}", 64, fill=i + 1, delay_s=0.0002) for i in range(3)]
        weights.append(weights[0])  # tied
        pool = TensorResidencyPool(max_cached_bytes=128, max_workers=1 + run % 2, strategy=strategy)
        seen = scan(pool, weights, depth=2)
        assert [(v.unique().tolist(), v.numel()) for v in seen] == [([s.fill], 64) for s in weights] * 3
        assert pool.lease_count == 0
        assert pool.resident_bytes <= 128
        assert all(source.most_at_once == 1 for source in weights)
        pool.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_at_different_places_see_right_values_within_the_budget(strategy):
    pool = TensorResidencyPool(max_cached_bytes=64 * 4, max_workers=2, strategy=strategy)
    weights = [CountingSource(f"w{i}", 64, fill=i) for i in range(12)]
    most = []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(15):
            for place, source in enumerate(weights):
                if chance.random() < 0.3:
                    pool.prefetch(weights[(place + 1) % 12])
                with pool.acquire(source) as value:
                    assert value.unique().tolist() == [source.fill]
                    most.append(pool.resident_bytes)

    run_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
    pool.flush()
    assert pool.lease_count == 0
    assert pool.resident_bytes <= 64 * 4
    assert max(most) <= 64 * (4 + 4)  # leased values may exceed the budget: one per thread
    pool.close()


def test_two_threads_share_the_learned_order():
    pool = TensorResidencyPool(max_cached_bytes=40, strategy=ResidencyStrategy.LEARNED)
    weights = sources(30)

    def work():
        for _ in range(20):
            for source in weights:
                use(pool, source)

    run_threads(work, work)
    # One pass over the weights reads at most 21 of 30 alone, and two threads must not do worse than that each.
    assert sum(source.reads for source in weights) <= 2 * (30 + 19 * 22)
    pool.close()


def test_evict_waits_for_a_load_in_progress():
    pool = TensorResidencyPool()
    (source,) = sources(1)
    source.gate = threading.Event()
    pool.prefetch(source)
    assert source.started.wait(60)
    threading.Timer(0.02, source.gate.set).start()
    pool.evict(source)
    assert not pool.is_resident(source)
    assert pool.resident_bytes == 0
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_prefetch():
    pool = TensorResidencyPool()
    a, b = sources(2)
    pool.prefetch(a).wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.prefetch(b).wait() is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_stores_what_another_thread_was_writing_back():
    pool, source = TensorResidencyPool(), WritableSource("w", torch.zeros(1))
    with pool.acquire(source, mode="read_write") as value:
        value.fill_(1)
    begun, gate, store = threading.Event(), threading.Event(), source.store
    source.store = lambda value: (begun.set(), gate.wait(60), store(value))
    thread = threading.Thread(target=pool.flush)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is ended
        gate.set()
        pool.close()
        os._exit(0 if source.stored.item() == 1 else 1)
    gate.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_room_put_aside_for_an_overtaken_load_of_another_thread():
    pool, source = TensorResidencyPool(max_cached_bytes=8), CountingSource("a")
    source.version, source.gate = 0, threading.Event()
    thread = threading.Thread(target=pool.resolve, args=(source,))
    thread.start()
    assert source.started.wait(60)
    source.version = 1
    assert not pool.is_resident(source)
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.used_bytes == 0 else 1)
    source.gate.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


@pytest.mark.parametrize("end", [lambda pool, source: pool.flush(), lambda pool, source: pool.evict(source)])
def test_what_no_worker_could_be_started_for_is_not_waited_for(end, monkeypatch):
    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", no_thread)
    pool, source = TensorResidencyPool(), CountingSource("a", fill=3)
    handle = pool.prefetch(source)
    ending = threading.Thread(target=end, args=(pool, source), daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert handle.wait().unique().tolist() == [3]
    pool.close()


def test_a_handle_gives_what_was_written_after_the_prefetch():
    pool = TensorResidencyPool(max_cached_bytes=0)
    source = WritableSource("w", torch.zeros(1))
    handle = pool.prefetch(source)
    handle.wait()
    source.store(torch.ones(1))
    assert handle.wait().item() == 1
    pool.close()


def test_a_second_prefetch_of_a_handed_value_reads_and_keeps_nothing():
    pool = TensorResidencyPool(max_cached_bytes=8)
    large = CountingSource("large", 100)
    first = pool.prefetch(large)
    assert first.wait() is pool.prefetch(large).wait()
    assert large.reads == 1
    assert pool.resident_bytes == 0
    pool.close()


def test_a_value_that_cannot_make_room_does_not_stay_claimed():
    pool = TensorResidencyPool(max_cached_bytes=4)
    dirty, other = WritableSource("dirty", torch.zeros(1)), CountingSource("other", 4)
    with pool.acquire(dirty, mode="read_write") as value:
        value += 1
    dirty.failures = 2
    with pytest.raises(StorageError, match="dirty: no space left"):
        pool.prefetch(other).wait()
    with pytest.raises(StorageError, match="dirty: no space left"):
        use(pool, other)
    assert not pool.is_resident(other)
    assert use(pool, other) is not None
    assert dirty.stored.item() == 1
    pool.evict(other)
    pool.close()


@pytest.mark.parametrize("options", [{}, {"strict": True, "readahead_nbytes": 8}], ids=["soft", "strict"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_threads_do_the_books_are_right_in_the_end(strategy, seed, options):
    if strategy is ResidencyStrategy.FIXED and options:
        pytest.skip("FIXED cannot be strict")
    pool = TensorResidencyPool(max_cached_bytes=40, max_workers=2, strategy=strategy, **options)
    stored = [WritableSource(f"w{i}", torch.zeros(2)) for i in range(8)]
    flaky = [CountingSource(f"f{i}", 8, fill=i) for i in range(4)]
    added = [0] * 8
    lock = threading.Lock()

    def add(chance):
        place = chance.randrange(8)
        with lock, pool.acquire(stored[place], mode="read_write") as value:
            value += 1
            added[place] += 1

    def read(chance):
        source = chance.choice(flaky)
        try:
            with pool.acquire(source) as value:
                assert value.unique().tolist() == [source.fill]
        except StorageError:
            pass

    def fail(chance):
        chance.choice(flaky).failures = 1

    def pin(chance):
        if strategy is not ResidencyStrategy.FIXED:
            source = chance.choice(stored)
            pool.pin(source).wait()
            pool.unpin(source)

    def evict(chance):
        with contextlib.suppress(ResidencyError):  # leased or pinned by another thread
            pool.evict(chance.choice(stored))

    def prefetch(chance):
        pool.prefetch(chance.choice(flaky + stored))

    def work(number):
        chance = random.Random(seed * 100 + number)
        for _ in range(150):
            chance.choice([add, add, read, read, fail, pin, evict, prefetch, lambda _: pool.flush()])(chance)

    run_threads(*(lambda number=number: work(number) for number in range(4)))
    pool.flush()
    assert pool.lease_count == 0
    assert pool.resident_bytes <= 40
    pool.close()
    assert pool.resident_bytes == 0
    assert [int(source.stored[0]) for source in stored] == added
    assert [int(source.stored[1]) for source in stored] == added
