"""Threads that load in the background."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock
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
        self._queue: SimpleQueue[tuple[Entry, Source]] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._active = self._idle = 0

    def put(self, entry: Entry, source: Source) -> None:
        """Queue an entry; returns at once."""
        entry.queued = True
        self._queue.put((entry, source))
        with self._lock:
            if self._active >= self._count or self._queue.qsize() <= self._idle:
                return
            self._active += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="t2n_hf-pool")
            threads = self._threads
        try:
            threads.submit(self._work)
        except RuntimeError:  # the interpreter ends, or has no more threads: who needs the value loads it
            with self._lock:
                self._active -= 1
            entry.queued = False

    def _work(self) -> None:
        try:
            while (found := self._next()) is not None:
                self.load(*found)
        except BaseException:
            with self._lock:
                self._active -= 1
            raise

    def _next(self) -> tuple[Entry, Source] | None:
        """Wait a moment for work; None when there is none, and the thread no longer counts."""
        with self._lock:
            self._idle += 1
        while True:
            try:
                found = self._queue.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._queue.empty():  # else it was put there since: `put` counts on this thread
                        self._idle -= 1
                        self._active -= 1
                        return None
            else:
                with self._lock:
                    self._idle -= 1
                return found

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
