"""Sources for the tests of the pool: they count, wait and fail as told."""

import threading
import time

import torch

from t2n_hf.errors import StorageError


class CountingSource:
    """A tensor of `nbytes` bytes whose elements all are `fill`; counts reads, can be slow or fail."""

    def __init__(self, key, nbytes=4, fill=0, delay_s=0.0):
        self.key, self.nbytes, self.fill, self.delay_s = key, nbytes, fill, delay_s
        self.reads, self.failures = 0, 0
        self.gate = None
        self.started = threading.Event()
        self.reading = 0
        self.most_at_once = 0

    def load(self, device):
        self.started.set()
        self.reads += 1
        self.reading += 1
        self.most_at_once = max(self.most_at_once, self.reading)
        try:
            if self.gate is not None:
                assert self.gate.wait(60)
            if self.failures:
                self.failures -= 1
                raise StorageError(f"weights.safetensors: tensor {self.key!r} is truncated")
            value = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            half = self.nbytes // 2
            value[:half] = self.fill
            if self.delay_s:
                time.sleep(self.delay_s)
            value[half:] = self.fill
            return value
        finally:
            self.reading -= 1


class WritableSource:
    """A stored tensor with a version."""

    def __init__(self, key, value):
        self.key, self.stored, self.version = key, value, 0
        self.reads, self.writes, self.failures = 0, 0, 0

    @property
    def nbytes(self):
        return self.stored.nbytes

    def load(self, device):
        self.reads += 1
        return self.stored.clone()

    def store(self, value):
        if self.failures:
            self.failures -= 1
            raise StorageError(f"{self.key}: no space left on device")
        self.writes += 1
        self.stored = value.clone()
        self.version += 1


def sources(count, nbytes=4):
    return [CountingSource(f"w{i}", nbytes, fill=i % 251) for i in range(count)]


def use(pool, source):
    with pool.acquire(source) as value:
        return value


def run_threads(*functions):
    """Run functions at once, each on a thread; raise the first error."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by who joins
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def holding(pool, source, until):
    """A thread that holds a lease until an event is set."""
    holds = threading.Event()

    def hold():
        with pool.acquire(source):
            holds.set()
            assert until.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    return thread
