"""What a pool keeps when its byte budget is exceeded.

A policy sees keys and never values. The pool calls it with its lock held: no method may block.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, final

__all__ = ["FirstFit", "LearnedOrder", "LeastRecent", "Policy", "ResidencyStrategy", "policy_of"]


class ResidencyStrategy(Enum):
    """Retention strategy for unleased values in a residency pool.

    LRU replaces the least recently used eligible value and permits manual pins. FIXED preserves its first-fit admitted
    set for the pool lifetime and rejects manual pin operations. LEARNED learns in the first pass in which order values
    are used and evicts the one whose next use is furthest away: of a cyclic scan larger than the budget it keeps almost
    as much as can be kept, where LRU keeps nothing. It permits manual pins.
    """

    LRU = "lru"
    FIXED = "fixed"
    LEARNED = "learned"


class Policy(Protocol):
    """Order of eviction."""

    def expect(self, key: Hashable) -> None:
        """Note that the calling thread will soon use `key`."""

    def touch(self, key: Hashable) -> None:
        """Note that the calling thread uses `key` now; its value may not be loaded yet."""

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Note that the value of `key` is loaded."""

    def forget(self, key: Hashable) -> None:
        """Note that the value of `key` left the pool."""

    def keeps(self, key: Hashable) -> bool:
        """Say whether an unused `key` may stay while the budget is held."""

    def victim(self, resident: list[Hashable], over: int) -> Hashable | None:
        """Choose what to evict among `resident` (evictable keys), `over` bytes being too many; None: nothing."""


@final
class LeastRecent:
    """Evict what was used longest ago."""

    def __init__(self) -> None:
        self._clock = 0
        self._used: dict[Hashable, int] = {}

    def expect(self, key: Hashable) -> None:
        """Nothing to note: a value counts as used when it arrives."""

    def touch(self, key: Hashable) -> None:
        """Make `key` the most recent one."""
        self._clock += 1
        self._used[key] = self._clock

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Make `key` the most recent one."""
        self.touch(key)

    def forget(self, key: Hashable) -> None:
        """Drop what is known of `key`."""
        self._used.pop(key, None)

    def keeps(self, key: Hashable) -> bool:
        """All of them."""
        return True

    def victim(self, resident: list[Hashable], over: int) -> Hashable | None:
        """Choose the least recent one when there is too much."""
        return min(resident, key=lambda key: self._used.get(key, 0)) if over > 0 and resident else None


@final
class FirstFit:
    """Keep the first values that fit into `max_bytes` (None: all of them), for ever; stream the others."""

    def __init__(self, max_bytes: int | None) -> None:
        self._left = max_bytes
        self._admitted: set[Hashable] = set()

    def expect(self, key: Hashable) -> None:
        """Nothing to note."""

    def touch(self, key: Hashable) -> None:
        """Nothing to note: use does not matter."""

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Admit `key` if it fits beside those admitted before."""
        if key in self._admitted or (self._left is not None and nbytes > self._left):
            return
        self._admitted.add(key)
        if self._left is not None:
            self._left -= nbytes

    def forget(self, key: Hashable) -> None:
        """Keep the place of an admitted value: the set is that of the pool's lifetime."""

    def keeps(self, key: Hashable) -> bool:
        """Only those admitted."""
        return key in self._admitted

    def victim(self, resident: list[Hashable], over: int) -> Hashable | None:
        """Choose any value that was not admitted, whether there is too much or not."""
        return next((key for key in resident if key not in self._admitted), None)


@dataclass
class _Reader:
    """Where one thread is in the order: its last use, the last key it expects, and when it was last seen."""

    last: Hashable
    tail: Hashable
    seen: int


@final
class LearnedOrder:
    """Evict what will be used last, in an order learned from what was used after what.

    The order is a cycle. A key seen for the first time is put after the one that its thread used before, so a first
    pass writes the order down and all later ones follow it; skipped and repeated uses only move the thread's place. The
    next use of a key is the nearest one over all threads, each counted from its own place: threads that run different
    prompts through one model do not disturb each other. In the first pass the latest value counts as furthest, as if
    the next pass began at once.
    """

    _IDLE_USES = 64

    def __init__(self) -> None:
        self._order: list[Hashable] = []
        self._place: dict[Hashable, int] = {}
        self._readers: dict[int, _Reader] = {}
        self._clock = 0

    def _insert_after(self, key: Hashable, before: Hashable | None) -> None:
        place = self._place.get(before, len(self._order) - 1) + 1
        self._order.insert(place, key)
        for shifted in range(place, len(self._order)):
            self._place[self._order[shifted]] = shifted

    def expect(self, key: Hashable) -> None:
        """Put a new key after what the thread uses or expects last."""
        reader = self._readers.get(threading.get_ident())
        if key not in self._place:
            self._insert_after(key, reader.tail if reader else None)
        if reader:
            reader.tail = key

    def touch(self, key: Hashable) -> None:
        """Move the calling thread to `key`."""
        self._clock += 1
        thread = threading.get_ident()
        reader = self._readers.get(thread)
        if reader is None:
            if key not in self._place:
                self._insert_after(key, None)
            self._readers[thread] = _Reader(key, key, self._clock)
            return
        if key not in self._place:
            self._insert_after(key, reader.last)
        if reader.tail == reader.last:
            reader.tail = key
        reader.last, reader.seen = key, self._clock

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Nothing to note: the order was learned when the key was used or expected."""

    def forget(self, key: Hashable) -> None:
        """Keep the place: the order outlives the values."""

    def _places_of_readers(self) -> list[int]:
        # A thread that ended, or waits for its next prompt, must not hold values for a use that may never come.
        stale = self._clock - 2 * len(self._order) - self._IDLE_USES
        for thread in [thread for thread, reader in self._readers.items() if reader.seen < stale]:
            del self._readers[thread]
        return [self._place[reader.last] for reader in self._readers.values()]

    def keeps(self, key: Hashable) -> bool:
        """All of them."""
        return True

    def victim(self, resident: list[Hashable], over: int) -> Hashable | None:
        """Choose the key whose next use is furthest when there is too much."""
        if over <= 0 or not resident:
            return None
        places, count = self._places_of_readers(), len(self._order)

        def distance(key: Hashable) -> int:
            place = self._place.get(key)
            if place is None:
                return count
            return min(((place - here - 1) % count for here in places), default=place)

        return max(resident, key=distance)


_POLICIES: dict[ResidencyStrategy, Callable[[int | None], Policy]] = {
    ResidencyStrategy.LRU: lambda max_bytes: LeastRecent(),
    ResidencyStrategy.FIXED: FirstFit,
    ResidencyStrategy.LEARNED: lambda max_bytes: LearnedOrder(),
}


def policy_of(strategy: ResidencyStrategy, max_bytes: int | None) -> Policy:
    """Make the policy of a strategy, for a budget of `max_bytes` (None: no limit)."""
    return _POLICIES[strategy](max_bytes)
