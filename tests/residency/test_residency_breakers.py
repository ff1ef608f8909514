"""What random stress found: room that pins and passing values take, newer values, forks, interrupts, ends."""

import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from residency_sources import CountingSource, WritableSource, sources, use

from t2n_hf.errors import ResidencyError
from t2n_hf.residency import Claim, ResidencyStrategy, TensorResidencyPool, forking, stream
from t2n_hf.residency.claims import Claims
from t2n_hf.residency.workers import Workers
from t2n_hf.tensor import OffloadedTensor

CPU = torch.device("cpu")
LEARNED = ResidencyStrategy.LEARNED
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def strict(max_bytes, **options):
    return TensorResidencyPool(max_bytes, strict=True, **{"strategy": LEARNED, **options})


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# ---- the limit ------------------------------------------------------------------------------------------------------


def test_a_lease_waits_for_another_when_what_is_pinned_leaves_no_room_for_both():
    pool = strict(12)
    pinned, a, b = CountingSource("p", 4), CountingSource("a", 8), CountingSource("b", 4)
    pool.pin(pinned).wait()
    opened = threading.Event()
    with pool.acquire(a):
        thread = started(lambda: (use(pool, b), opened.set()))
        assert not opened.wait(0.2)
    assert opened.wait(60)
    thread.join(60)
    assert pool.peak_bytes == 12
    pool.close()


def test_room_is_kept_for_a_pinned_value_that_has_to_be_read_again():
    pool = strict(12)
    pinned, a, b = WritableSource("p", torch.zeros(1)), CountingSource("a", 8), CountingSource("b", 4)
    pool.pin(pinned).wait()
    pinned.store(torch.ones(1))
    with pool.acquire(a):
        assert not pool.is_resident(pinned)
        thread = started(lambda: use(pool, b))
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(60)
    assert pool.peak_bytes == 12
    pool.close()


@pytest.fixture
def small_slots(monkeypatch):
    monkeypatch.setattr(stream, "_SLOT_NBYTES", 8)
    monkeypatch.setattr(stream, "STREAM_NBYTES", 32)
    monkeypatch.setattr(stream, "_LEAST_BUDGET", 64)


class Stepping(CountingSource):
    count = 10

    def steps(self, slot_nbytes):
        return self

    def read(self, at, slot):
        return slot.fill_(self.fill)


def passing():
    """A pool that has seen two passes, its values, and one of them that passes."""
    pool = strict(320, readahead_nbytes=80)
    weights = [Stepping(f"w{i}", 80, fill=i) for i in range(8)]
    for source in weights * 2:
        claim = Claim()
        pool.open(claim, [(source, CPU)])
        if not pool.stream(source, CPU, lambda rows: None):
            pool.resolve(source)
        pool.release(claim)
    pool.flush()
    return pool, weights, next(source for source in weights if pool.stream(source, CPU, lambda rows: None))


@pytest.mark.usefixtures("small_slots")
def test_a_value_that_can_pass_is_loaded_for_a_lease():
    pool, _weights, source = passing()
    with pool.acquire(source) as value:
        assert value.unique().tolist() == [source.fill]
    pool.close()


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("what", ["a lease", "close"])
def test_what_passes_is_waited_for_by(what):
    pool, _weights, source = passing()
    inside, go_on = threading.Event(), threading.Event()
    thread = started(lambda: pool.stream(source, CPU, lambda rows: (inside.set(), go_on.wait(60))))
    assert inside.wait(60)
    large = CountingSource("large", 320)
    other = started(lambda: use(pool, large) if what == "a lease" else pool.close())
    other.join(0.3)
    assert other.is_alive()
    go_on.set()
    other.join(60)
    thread.join(60)
    assert not other.is_alive()
    assert pool.peak_bytes <= 320
    pool.close()
    assert pool.used_bytes == 0


# ---- newer values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["evict", "flush"])
def test_a_value_that_is_stored_while_an_older_one_is_written_back_stays(end, monkeypatch):
    weight = OffloadedTensor.from_original_tensor(torch.zeros(4), "w")
    pool, source = TensorResidencyPool(), weight.source
    with pool.acquire(weight, mode="read_write") as value:
        value.fill_(1)
    put, once = type(source)._put, []

    def overtaken(self, value, version):
        if not once:
            once.append(1)
            put(self, torch.full((4,), 2.0), None)
        return put(self, value, version)

    monkeypatch.setattr(type(source), "_put", overtaken)
    getattr(pool, end)(weight)
    assert pool.resolve(weight).tolist() == [2.0] * 4
    pool.close()
    assert source.load(CPU).tolist() == [2.0] * 4


@pytest.mark.parametrize("way", ["resolve", "prefetch", "lease"])
def test_a_value_that_is_stored_during_a_write_back_is_what_others_get(way):
    pool, source = TensorResidencyPool(), WritableSource("w", torch.zeros(1))
    with pool.acquire(source, mode="read_write") as value:
        value.fill_(1)
    begun, go_on = threading.Event(), threading.Event()
    source.replace = lambda value, version: (begun.set(), go_on.wait(60), None)[2]
    thread = started(pool.flush)
    assert begun.wait(60)
    source.store(torch.full((1,), 2.0))
    threading.Timer(0.1, go_on.set).start()
    ways = {"resolve": pool.resolve, "prefetch": lambda source: pool.prefetch(source).wait()}
    assert ways.get(way, lambda source: use(pool, source))(source).item() == 2
    thread.join(60)
    pool.close()


def test_a_lease_that_waited_while_the_pool_closed_is_refused(monkeypatch):
    pool, source = strict(8), CountingSource("w")
    monkeypatch.setattr(Claims, "_admit", lambda self, claim, wanted, thread: setattr(self._table, "closed", True))
    with pytest.raises(ResidencyError, match="closed"):
        use(pool, source)
    assert pool.lease_count == source.reads == 0


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_what_comes_to_a_pool_while_it_closes_is_refused():
    pool, dirty, late = TensorResidencyPool(), WritableSource("d", torch.zeros(1)), CountingSource("late")
    with pool.acquire(dirty, mode="read_write") as value:
        value.fill_(1)
    refused = []

    def store(value):
        for use_late in (pool.resolve, pool.prefetch, lambda source: use(pool, source)):
            with pytest.raises(ResidencyError, match="closed"):
                use_late(late)
            refused.append(1)

    dirty.store = store
    pool.close()
    assert len(refused) == 3
    assert (late.reads, pool.used_bytes) == (0, 0)


def test_a_handle_that_no_worker_serves_is_not_waited_for_when_the_pool_has_closed(monkeypatch):
    def no_threads(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", no_threads)
    pool, source = TensorResidencyPool(), CountingSource("w")
    handle = pool.prefetch(source)
    pool.close()
    refused = []

    def wait():
        with pytest.raises(ResidencyError, match="closed"):
            handle.wait()
        refused.append(1)

    started(wait).join(60)
    assert refused


@pytest.mark.parametrize("what", [Workers, stream.Stream])
def test_a_pool_whose_close_is_interrupted_holds_nothing(what, monkeypatch):
    pool, source = TensorResidencyPool(64, strategy=LEARNED, readahead_nbytes=8), CountingSource("w")
    use(pool, source)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(what, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert pool.closed
    assert pool.used_bytes == 0


def test_a_read_that_a_closing_pool_overtakes_is_refused(monkeypatch):
    pool, source = TensorResidencyPool(), CountingSource("w")
    resolve = Claims.resolve

    def late(self, *wanted):
        pool.close()
        return resolve(self, *wanted)

    monkeypatch.setattr(Claims, "resolve", late)
    with pytest.raises(ResidencyError, match="closed"):
        pool.resolve(source)
    assert (source.reads, pool.used_bytes) == (0, 0)


def test_workers_end_though_each_others_work_kept_them_from_looking():
    taken, interval = [], sys.getswitchinterval()

    def busy(entry, source):
        taken.append(source)
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            pass

    workers = Workers(3, busy)
    sys.setswitchinterval(0.1)  # a thread that is woken goes on when the time that it waits is over
    try:
        for _ in range(8):
            for _ in range(3):
                workers.put(SimpleNamespace(queued=False), 0)
            time.sleep(0.01)
    finally:
        sys.setswitchinterval(interval)
    ending = started(workers.close)
    ending.join(60)
    assert not ending.is_alive()
    assert len(taken) == 24


def test_what_is_queued_behind_a_load_that_exits_is_loaded():
    class Exiting(CountingSource):
        def load(self, device):
            super().load(device)
            raise SystemExit

    pool, exiting, source = TensorResidencyPool(), Exiting("e"), CountingSource("w")
    exiting.gate = threading.Event()
    failing, handle = pool.prefetch(exiting), pool.prefetch(source)
    assert exiting.started.wait(60)
    exiting.gate.set()
    with pytest.raises(SystemExit):
        failing.wait()
    flushing = started(pool.flush)
    flushing.join(60)
    assert not flushing.is_alive()
    assert handle.wait().numel() == 4
    pool.close()


# ---- forks ----------------------------------------------------------------------------------------------------------


def ends_well(child_does):
    """Run a function in a forked child, which has a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # what faulthandler has for this hangs where pytest has its own timeout
        good = False
        with suppress(BaseException):
            good = child_does()
        os._exit(0 if good else 1)
    return os.waitpid(child, 0)[1] == 0


@needs_fork
@forks
@pytest.mark.parametrize("options", [{}, {"strict": True}], ids=["soft", "strict"])
def test_a_forked_child_closes_a_pool_of_which_another_thread_has_a_lease(options):
    pool = TensorResidencyPool(8, **options)
    a, b = sources(2)
    lease, opened, done = pool.acquire(a), threading.Event(), threading.Event()
    thread = started(lambda: (lease.open(), opened.set(), done.wait(60), lease.release()))
    assert opened.wait(60)

    def child_does():
        with pool.acquire(b), suppress(ResidencyError):
            pool.close()
            return False
        pool.close()
        lease.release()
        return pool.used_bytes == pool.lease_count == 0

    assert ends_well(child_does)
    assert pool.lease_count == 1
    done.set()
    thread.join(60)
    pool.close()


@needs_fork
@forks
def test_a_forked_child_does_not_wait_for_the_stale_load_of_another_thread():
    pool, source = TensorResidencyPool(), CountingSource("a", fill=5)
    source.version, source.gate = 0, threading.Event()
    handle = pool.prefetch(source)
    assert source.started.wait(60)
    source.version = 1
    assert not pool.is_resident(source)

    def child_does():
        source.gate = None
        return handle.wait().unique().tolist() == [5]

    assert ends_well(child_does)
    source.gate.set()
    pool.close()


@needs_fork
def test_threads_that_fork_at_once_hold_the_pools_for_one_fork_each(monkeypatch):
    first, second = threading.Event(), threading.Event()
    seen = []

    class Held:
        lock = threading.Lock()

        def before_fork(self):
            self.lock.acquire()

        def after_fork_in_parent(self):
            self.lock.release()
            if not first.is_set():  # the other thread comes now
                first.set()
                second.wait(0.5)

    monkeypatch.setattr(forking, "_TOLD", {held := Held()})

    def fork_after():
        assert first.wait(60)
        forking._before()
        second.set()
        time.sleep(0.1)
        seen.append(held.lock.locked())
        forking._in_parent()

    thread = started(fork_after)
    forking._before()
    forking._in_parent()
    thread.join(60)
    assert seen == [True]


@needs_fork
def test_pools_may_be_made_in_one_thread_while_another_one_forks(monkeypatch):
    class Told:
        def before_fork(self):
            pass

        after_fork_in_parent = before_fork

    known, made, done, interval = [Told() for _ in range(5000)], [], threading.Event(), sys.getswitchinterval()
    monkeypatch.setattr(forking, "_TOLD", weakref.WeakSet(known))

    def make():
        while not done.is_set():
            made.append(Told())
            forking.tell_of_forks(made[-1])

    sys.setswitchinterval(1e-6)
    thread = started(make)
    try:
        for _ in range(20):
            forking._before()
            assert len(forking._HELD) >= len(known)
            forking._in_parent()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join(60)
