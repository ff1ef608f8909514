"""Reading ahead: what is read, when, and at whose expense."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from residency_sources import CountingSource, run_threads, sources, use

from t2n_hf.errors import ConfigError, StorageError
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool, loading

LEARNED = ResidencyStrategy.LEARNED


def reading(max_bytes, window, **options):
    options.setdefault("strict", True)
    return TensorResidencyPool(max_bytes, strategy=LEARNED, readahead_nbytes=window, **options)


def pass_over(pool, weights, seconds=0.0):
    for source in weights:
        with pool.acquire(source) as value:
            assert value.unique().tolist() == [source.fill]
            if seconds:
                time.sleep(seconds)


def settled(pool):
    """Wait until nothing is loaded any more."""
    pool.flush()


def reads_of(weights):
    return sum(source.reads for source in weights)


def bytes_read(weights):
    return sum(source.reads * source.nbytes for source in weights)


def llama(layers=12, scale=16):
    """Sizes of the matrices of a decoder in their order of use, with a large one at the end."""
    sizes = [16, 4, 4, 16, 44, 44, 44] * layers + [130]
    return [CountingSource(f"w{i}", size * scale, fill=i % 251) for i, size in enumerate(sizes)]


def test_the_next_value_is_loaded_while_one_is_used():
    pool = reading(12, 4)
    weights = sources(5)
    pass_over(pool, weights)
    assert reads_of(weights) == 5  # nothing was known in the first pass
    first, second = weights[:2]
    assert not pool.is_resident(weights[3])
    with pool.acquire(weights[2]):
        for _ in range(4000):
            if pool.is_resident(weights[3]):
                break
            time.sleep(0.005)
    assert pool.is_resident(weights[3])
    assert weights[3].reads == 2
    assert (first.reads, second.reads) == (1, 1)
    pool.close()


@pytest.mark.parametrize("window", [0, 8, 12, 40])
def test_whatever_is_read_ahead_the_budget_holds_and_values_are_right(window):
    weights = [CountingSource(f"w{i}", 4, fill=i, delay_s=0.0003) for i in range(20)]
    pool = reading(40, window, max_workers=2)
    for _ in range(6):
        pass_over(pool, weights, 0.0002)
    settled(pool)
    assert pool.peak_bytes <= 40
    assert pool.lease_count == 0
    assert all(source.most_at_once == 1 for source in weights)
    pool.close()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("readahead", [True, False])
def test_a_cyclic_scan_in_half_of_the_memory_reads_little_more_than_the_other_half(readahead, strict):
    weights = llama()
    total = sum(source.nbytes for source in weights)
    window = min(total // 2 // 12, total // 40)  # as hf.hooks chooses it
    pool = reading(total // 2, window if readahead else 0, strict=strict)
    read = []
    for _ in range(8):
        pass_over(pool, weights, 0.0001)
        settled(pool)
        read.append(bytes_read(weights))
    per_pass = [(after - before) / total for before, after in pairwise(read)]
    assert read[0] == total
    assert max(per_pass) <= 0.55, per_pass
    assert pool.peak_bytes <= total // 2
    pool.close()


def test_a_large_value_that_comes_next_is_read_ahead_though_it_exceeds_the_window():
    small, large = sources(8), CountingSource("large", 20, fill=99)
    pool = reading(28, 6)
    weights = [*small, large]
    for _ in range(3):
        pass_over(pool, weights)
        settled(pool)
    pass_over(pool, small[:-1])
    pool.evict(large)
    with pool.acquire(small[-1]):
        settled(pool)
        assert pool.is_resident(large)
    pool.close()


def test_values_of_which_two_do_not_fit_beside_each_other_are_read_when_they_are_needed():
    weights = [CountingSource(f"w{i}", 10, fill=i) for i in range(4)]
    pool = reading(15, 5)
    for _ in range(3):
        pass_over(pool, weights)
        settled(pool)
    assert pool.peak_bytes == 10
    assert reads_of(weights) == 12
    pool.close()


def test_values_that_a_pass_skips_do_not_keep_others_from_being_read():
    weights = sources(12)
    pool = reading(24, 4)
    pass_over(pool, weights)
    taken = [source for source in weights if source.key not in ("w4", "w8")]
    for _ in range(4):
        for source in taken:
            with pool.acquire(source):
                settled(pool)
        before = reads_of(taken)
    # In the end what follows is there before it is asked for.
    for source, following in pairwise(taken):
        with pool.acquire(source):
            settled(pool)
            assert pool.is_resident(following) or following.key in ("w5", "w9"), following.key
    assert before > 0
    assert pool.peak_bytes <= 24
    pool.close()


def test_what_is_queued_is_taken_back_when_its_room_is_needed_now():
    weights = sources(6)
    pool = reading(12, 8)
    pass_over(pool, weights)
    gate = threading.Event()
    slow, queued = weights[1], weights[2]
    pool.evict(slow)
    slow.gate = gate
    slow.started.clear()
    with pool.acquire(weights[0]):  # one byte range is read slowly, the next one waits for it
        assert slow.started.wait(60)
        other = CountingSource("other", 4, fill=77)
        reads = queued.reads
        with pool.acquire(other) as value:
            assert value.unique().tolist() == [77]
            assert pool.used_bytes <= 12
            assert queued.reads == reads
    gate.set()
    settled(pool)
    assert use(pool, queued).unique().tolist() == [queued.fill]
    assert pool.peak_bytes <= 12
    pool.close()


def test_a_read_that_failed_ahead_is_tried_again_and_reported_when_it_fails_again():
    weights = sources(5)
    pool = reading(12, 4)
    pass_over(pool, weights)
    bad = weights[3]
    bad.failures = 2
    with pool.acquire(weights[2]):
        settled(pool)
    assert bad.failures == 1
    assert not pool.is_resident(bad)
    with pytest.raises(StorageError, match=r"weights.safetensors: tensor 'w3' is truncated"):
        use(pool, bad)
    assert use(pool, bad).unique().tolist() == [3]  # the file was restored
    assert pool.lease_count == 0
    assert pool.used_bytes <= 12
    pass_over(pool, weights)
    pool.close()


def test_threads_at_different_places_read_ahead_for_themselves():
    weights = [CountingSource(f"w{i}", 8, fill=i, delay_s=0.0001) for i in range(24)]
    pool = reading(12 * 8, 16, max_workers=2)

    def work():
        for _ in range(6):
            pass_over(pool, weights, 0.0001)

    run_threads(work, work, work)
    settled(pool)
    assert pool.peak_bytes <= 12 * 8
    assert pool.lease_count == 0
    pool.close()


class AdvisedSource(CountingSource):
    advised = 0

    def advise(self):
        self.advised += 1


def test_slow_files_are_told_what_is_needed_after_what_is_read_now(monkeypatch):
    monkeypatch.setattr(loading, "SLOW_BYTES_PER_S", 1e15)
    monkeypatch.setattr(loading, "TELLING_NBYTES", 0)
    weights = [AdvisedSource(f"w{i}", 4, fill=i) for i in range(12)]
    pool = reading(12, 4)
    for _ in range(3):
        for source in weights:
            with pool.acquire(source):
                settled(pool)
    assert sum(source.advised for source in weights) > 8
    # Once for each time that it is read.
    assert all(source.advised <= source.reads for source in weights)
    pool.close()


def test_other_devices_are_read_ahead_as_well():
    weights = sources(5)
    pool = reading(12, 4)
    for _ in range(3):
        for source in weights:
            with pool.acquire(source, "meta") as value:
                assert value.device == torch.device("meta")
                settled(pool)
    with pool.acquire(weights[0], "meta"):
        settled(pool)
        assert pool.is_resident(weights[1])
    pool.close()


@pytest.mark.parametrize("strategy", [ResidencyStrategy.LRU, ResidencyStrategy.FIXED])
def test_strategies_that_know_no_order_read_nothing_ahead(strategy):
    pool = TensorResidencyPool(12, strategy=strategy, readahead_nbytes=8)
    weights = sources(5)
    for _ in range(2):
        pass_over(pool, weights)
    reads = reads_of(weights)
    settled(pool)
    assert reads_of(weights) == reads
    pool.close()


def test_a_negative_window_is_refused():
    with pytest.raises(ConfigError, match="readahead_nbytes"):
        TensorResidencyPool(12, readahead_nbytes=-1)


def test_values_whose_tensors_are_gone_leave_the_pool_and_the_order():
    pool = reading(None, 8, strict=False)
    weights = sources(6)
    pass_over(pool, weights)
    pass_over(pool, weights)
    assert pool.resident_bytes == 24
    with pool.acquire(weights[2]):
        kept = weights[2]
        del weights[1:4]
        assert pool.resident_bytes == 4 * 4
    del kept
    assert pool.resident_bytes == 3 * 4
    pass_over(pool, weights)
    pool.close()
