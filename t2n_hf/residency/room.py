"""The byte budget of a pool: what is in it, who may use it, and how threads wait for room."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Lock, Thread, current_thread
from typing import Final, final

__all__ = ["Grant", "Patience", "Room"]

_TICK_S: Final = 0.05
_PATIENCE_S: Final = 10.0


@dataclass(slots=True)
class Grant:
    """That a thread holds leases: `claims` open ones, and `promise` bytes put aside for those that it will open yet."""

    claims: int
    promise: int


@final
class Patience:
    """How long one wait has seen nothing happen in the pool.

    Time in which the whole process did not run (it was stopped, or the machine slept) does not count, nor does what was
    spent elsewhere between two looks, beyond a few ticks.
    """

    __slots__ = ("_news", "_seen", "_waited_s")

    def __init__(self) -> None:
        self._news = -1
        self._seen = self._waited_s = 0.0

    def is_over(self, news: int) -> bool:
        """Say whether nothing happened for too long; `news` counts what happened."""
        now = time.monotonic()
        since = min(now - self._seen, 4 * _TICK_S)
        self._waited_s = self._waited_s + since if news == self._news else 0.0
        self._news, self._seen = news, now
        return self._waited_s > _PATIENCE_S


@final
class Room:
    """Bytes of one pool. Every field is read and written with `lock` held; so are the methods called.

    `loaded` counts the values that are in memory, those that left the table but are still leased included; `reserved`
    those that are being loaded; `leased` those of both kinds that are leased, each once; `promised` what is put aside
    for leases that will be opened; `most` is the largest sum of loaded and reserved so far. `busy` counts reads and
    write-backs under way, each of which ends by itself. So does `passing`, the thread that uses a value in pieces.

    A `strict` room makes threads wait, so that loaded + reserved never exceeds `max_bytes`. A thread that holds leases
    waits for reads alone, and one that holds none for the leases of others: so somebody always goes on. A thread that
    has seen nothing happen for 10 s goes on as well: who holds the leases may be waiting for it.
    """

    def __init__(self, max_bytes: int | None, strict: bool) -> None:
        self.max_bytes = max_bytes
        self.strict = strict and max_bytes is not None
        self.loaded = self.reserved = self.leased = self.promised = self.most = self.busy = 0
        self.grants: dict[Thread, Grant] = {}
        self.passing: Thread | None = None
        self.before_wait: Callable[[], None] | None = None
        self._queue: deque[object] = deque()
        self._news = 0
        self.renew()

    def renew(self) -> None:
        """Begin with a lock that nobody holds, and nobody who waits: in a forked child both may be gone."""
        self.lock = Lock()
        self._changed = Condition(self.lock)
        self._queue.clear()
        self._asleep = self.busy = 0
        self.passing = None

    def over(self, needed: int) -> int:
        """Bytes above the budget when `needed` more come."""
        return 0 if self.max_bytes is None else self.loaded + self.reserved + needed - self.max_bytes

    def is_oversized(self, nbytes: int) -> bool:
        """Say whether a value can never be retained."""
        return self.max_bytes is not None and nbytes > self.max_bytes

    def reserve(self, nbytes: int) -> None:
        """Put bytes aside for a value that is about to be loaded."""
        most = max(self.most, self.loaded + self.reserved + nbytes)
        self.reserved += nbytes  # an interrupt comes with a call: both, or nothing
        self.most = most

    def wake(self) -> None:
        """Let those who wait look again."""
        self._news += 1
        if self._asleep:
            self._changed.notify_all()

    def sleep(self) -> None:
        """Wait until something changes, or a little while."""
        self._asleep += 1
        try:
            self._changed.wait(_TICK_S)
        finally:
            self._asleep -= 1

    def is_passing(self) -> bool:
        """Say whether another thread uses a value in pieces."""
        return self.passing not in (None, current_thread()) and self.passing.is_alive()

    # ---- leases that wait -----------------------------------------------------------------------------------------

    def admit(self, thread: Thread, need: Callable[[], int]) -> None:
        """Wait until `thread`, which holds no lease, may have `need()` more bytes in use; first come, first served."""
        if not self._queue and (not self.grants or self._fits(need())):
            return
        ticket, patience = object(), Patience()
        self._queue.append(ticket)
        try:
            while self._queue[0] is not ticket or (self.others_hold(thread) and not self._fits(need())):
                if not self.wait_for_others(patience):
                    return
        finally:
            self._queue.remove(ticket)
            self.wake()

    def _fits(self, need: int) -> bool:
        return self.max_bytes is None or self.leased + self.promised + need <= self.max_bytes

    def others_hold(self, thread: Thread) -> bool:
        """Say whether another thread holds leases that it may release yet."""
        return any(holder is not thread and holder.is_alive() for holder in self.grants)

    def wait_for_others(self, patience: Patience) -> bool:
        """Sleep once; False when that has been in vain for long."""
        if patience.is_over(self._news):
            return False
        if self.before_wait is not None:
            self.lock.release()
            try:
                self.before_wait()
            finally:
                self.lock.acquire()
        self.sleep()
        return True

    def grant(self, thread: Thread, promise: int) -> None:
        """Note that `thread`, which holds no lease, opens one and has `promise` bytes put aside."""
        granted = Grant(1, promise)
        self.promised += promise
        self.grants[thread] = granted

    def take(self, grant: Grant, nbytes: int) -> int:
        """Use up to `nbytes` of what is put aside for a thread; say how many."""
        taken = min(grant.promise, nbytes)
        grant.promise -= taken
        self.promised -= taken
        return taken

    def give_back(self, thread: Thread, taken: int) -> None:
        """End a claim of `thread`, which took `taken` bytes of what is put aside for it."""
        grant = self.grants.get(thread)
        if grant is None:
            return
        grant.claims -= 1
        if grant.claims:
            grant.promise += taken
            self.promised += taken
        else:
            self.promised -= grant.promise
            del self.grants[thread]
