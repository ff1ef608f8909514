"""Threads that load in the background."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Lock
from typing import Final, final

from t2n_hf.residency.entry import Entry
from t2n_hf.residency.source import Source

__all__ = ["Workers"]

_IDLE_S: Final = 0.02


@final
class Workers:
    """Up to `count` threads that call `load(entry, source)` for what is put into their queue, in order.

    A thread that has had nothing to do for a moment goes back to its executor, which ends it with the interpreter.
    """

    def __init__(self, count: int, load: Callable[[Entry, Source], None]) -> None:
        self._count = count
        self.load = load
        self.renew()

    def renew(self) -> None:
        """Begin anew: a forked child has none of its parent's threads, nor should it do their work."""
        self._queue: deque[tuple[Entry, Source]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._active = self._idle = 0

    def put(self, entry: Entry, source: Source) -> None:
        """Queue an entry; returns at once."""
        with self._lock:
            self._queue.append((entry, source))
            self._changed.notify()
            if self._active < self._count and len(self._queue) > self._idle and not self._start():
                return
            entry.queued = True

    def _start(self) -> bool:
        """Start a thread; False when there can be none: who needs the value loads it. `_lock` held."""
        try:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="t2n_hf-pool")
            self._threads.submit(self._work)
        except RuntimeError:  # the interpreter ends, or has no more threads
            return False
        self._active += 1
        return True

    def _work(self) -> None:
        try:
            while (found := self._next()) is not None:
                self.load(*found)
                del found  # a source that is held here while there is nothing to do would outlive its tensor
        except BaseException:
            with self._lock:
                self._active -= 1
            raise

    def _next(self) -> tuple[Entry, Source] | None:
        """Wait a moment for work; None when there is none, and the thread no longer counts."""
        with self._lock:
            self._idle += 1
            while not self._queue and self._changed.wait(_IDLE_S):
                pass
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._active -= 1
            return None

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
