"""An order of use that is learned while it is followed, and what to evict and to read ahead by it."""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from t2n_hf.residency.policy import Evictable

__all__ = ["LearnedOrder"]

_IDLE_USES: Final = 64
# An encoder runs once, and its decoder many times after it.
_PASSES_LEFT_OUT: Final = 8


@dataclass(slots=True)
class _Reader:
    """Where one thread is in the order.

    `last` is its last use, `tail` the last key it expects, `seen` the clock when it was last seen; `passed` are the
    keys of its present pass, in order, in which it went backwards `turns` times.
    """

    last: Hashable
    tail: Hashable
    seen: int
    passed: dict[Hashable, None] = field(default_factory=dict)
    turns: int = 0


@final
class LearnedOrder:
    """Evict what will be used last, in an order learned from what was used after what.

    The order is a cycle. A key seen for the first time is put after the one that its thread used before, so a first
    pass writes the order down and all later ones follow it; skipped and repeated uses only move the thread's place. A
    pass that goes back and forth shows that the order is another one: it then becomes that of this pass. The next use
    of a key is the nearest one over all threads, each counted from its own place: threads that run different prompts
    through one model do not disturb each other. In the first pass the latest value counts as furthest, as if the next
    pass began at once.

    What a single thread left out of its last passes counts as furthest of all, and as nothing that comes next, until it
    is used again, together with what was left out behind it.

    To find what to evict takes O(log n) for n keys, beside what is in use.
    """

    def __init__(self) -> None:
        self._order: list[Hashable] = []
        self._place: dict[Hashable, int] = {}
        self._loaded: list[int] = []  # places of the keys whose values are loaded, ascending
        self._readers: dict[int, _Reader] = {}
        self._clock = 0
        self._passes = 0
        self._seen: dict[Hashable, int] = {}  # the pass in which a key was used last
        self._left_out: dict[Hashable, None] = {}  # of what is loaded

    # ---- learning -------------------------------------------------------------------------------------------------

    def _insert_after(self, key: Hashable, before: Hashable | None) -> None:
        place = self._place.get(before, len(self._order) - 1) + 1
        self._order.insert(place, key)
        for shifted in range(place, len(self._order)):
            self._place[self._order[shifted]] = shifted
        for at in range(bisect_left(self._loaded, place), len(self._loaded)):
            self._loaded[at] += 1

    def _set_order(self, order: Iterable[Hashable]) -> None:
        loaded = {self._order[place] for place in self._loaded}
        self._order = list(order)
        self._place = {key: place for place, key in enumerate(self._order)}
        self._loaded = sorted(self._place[key] for key in loaded if key in self._place)

    def expect(self, key: Hashable) -> None:
        """Put a new key after what the thread uses or expects last."""
        reader = self._readers.get(threading.get_ident())
        if key not in self._place:
            self._insert_after(key, reader.tail if reader else None)
        if reader:
            reader.tail = key
        self._see(key)

    def touch(self, key: Hashable) -> None:
        """Move the calling thread to `key`."""
        self._clock += 1
        self._see(key)
        thread = threading.get_ident()
        reader = self._readers.get(thread)
        if reader is None:
            self._left_out.clear()
            if key not in self._place:
                self._insert_after(key, None)
            self._readers[thread] = _Reader(key, key, self._clock, {key: None})
            return
        reader.seen = self._clock
        if key == reader.last:
            return
        if key not in self._place:
            self._insert_after(key, reader.last)
        if key in reader.passed:
            self._end_pass(reader)
        if reader.passed and self._place[key] < self._place[reader.last]:
            reader.turns += 1
        reader.passed[key] = None
        if reader.tail == reader.last:
            reader.tail = key
        reader.last = key

    def _end_pass(self, reader: _Reader) -> None:
        passed, turns = reader.passed, reader.turns
        reader.passed, reader.turns = {}, 0
        self._passes += 1
        if len(self._readers) == 1:
            loaded = (self._order[place] for place in self._loaded)
            self._left_out = dict.fromkeys(filter(self._is_left_out, loaded))
        if turns <= 1:  # a pass that began in the middle turns once
            return
        # What this pass left out stays behind what it came after before.
        start = self._place[next(iter(passed))]
        behind: dict[Hashable, list[Hashable]] = {}
        for key in self._order[start:] + self._order[:start]:
            if key in passed:
                behind[key] = latest = [key]
            else:
                latest.append(key)
        self._set_order(key for first in passed for key in behind[first])

    def _is_left_out(self, key: Hashable) -> bool:
        return self._passes - self._seen.get(key, self._passes) > _PASSES_LEFT_OUT and len(self._readers) == 1

    def _see(self, key: Hashable) -> None:
        if self._is_left_out(key):
            for other in self._after(key):
                if not self._is_left_out(other):
                    break
                self._seen[other] = self._passes
                self._left_out.pop(other, None)
        self._seen[key] = self._passes
        self._left_out.pop(key, None)

    def remove(self, key: Hashable) -> None:
        """Take `key` out of the order."""
        self._seen.pop(key, None)
        self._left_out.pop(key, None)
        if key not in self._place:
            return
        for reader in self._readers.values():
            reader.passed.pop(key, None)
        place = self._place[key]
        self._readers = {t: r for t, r in self._readers.items() if key not in (r.last, r.tail)}
        self._set_order(self._order[:place] + self._order[place + 1 :])

    # ---- what is loaded -------------------------------------------------------------------------------------------

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Note that it can be evicted."""
        if key not in self._place:
            self._insert_after(key, None)
        place = self._place[key]
        at = bisect_left(self._loaded, place)
        if at == len(self._loaded) or self._loaded[at] != place:
            insort(self._loaded, place)

    def forget(self, key: Hashable) -> None:
        """Keep the place: the order outlives the values."""
        self._left_out.pop(key, None)
        place = self._place.get(key, -1)
        at = bisect_left(self._loaded, place)
        if at < len(self._loaded) and self._loaded[at] == place:
            del self._loaded[at]

    # ---- what comes next ------------------------------------------------------------------------------------------

    def _places_of_readers(self) -> list[int]:
        if len(self._readers) == 1:
            return [self._place[reader.last] for reader in self._readers.values()]
        # A thread that ended, or waits for its next prompt, must not hold values for a use that may never come.
        stale = self._clock - 2 * len(self._order) - _IDLE_USES
        for thread in [thread for thread, reader in self._readers.items() if reader.seen < stale]:
            del self._readers[thread]
        return sorted({self._place[reader.last] for reader in self._readers.values()}) or [len(self._order) - 1]

    def keeps(self, key: Hashable) -> bool:
        """All of them."""
        return True

    def distance(self, key: Hashable) -> int:
        """Count from the thread that will be there first."""
        count, place = len(self._order), self._place.get(key)
        if place is None:
            return count
        return min((place - here - 1) % count for here in self._places_of_readers())

    def victim(self, evictable: Evictable, over: int, beyond: int = -1) -> Hashable | None:
        """Choose the key whose next use is furthest when there is too much."""
        if over <= 0 or not self._loaded:
            return None
        readers = self._places_of_readers()
        if self._left_out:
            found = next(filter(evictable, self._left_out), None)
            if found is not None:
                return found
        chosen, furthest = None, beyond
        for here, until in zip(readers, readers[1:] + readers[:1], strict=True):
            # The keys between a thread and the next one ahead of it; of these the last will be used last.
            length = (until - here - 1) % len(self._order) + 1
            if length - 1 > furthest:
                key, distance = self._last_of(until, length, evictable)
                if distance > furthest:
                    chosen, furthest = key, distance
        return chosen

    def _last_of(self, until: int, length: int, evictable: Evictable) -> tuple[Hashable | None, int]:
        """Find the last loaded, evictable key of the `length` places up to `until`, and its distance from the first."""
        last = bisect_right(self._loaded, until) - 1
        for at in range(last, last - len(self._loaded), -1):
            back = (until - self._loaded[at]) % len(self._order)
            if back >= length:
                break
            key = self._order[self._loaded[at]]
            if evictable(key):
                return key, length - 1 - back
        return None, -1

    def is_cyclic(self, evictable: Evictable) -> bool:
        """Whether one thread goes round, has been all round once, and all that can be evicted is on its way."""
        if not self._passes or len(self._places_of_readers()) != 1:
            return False
        return not any(map(evictable, self._left_out))

    def upcoming(self) -> Iterator[Hashable]:
        """Give what the calling thread uses next; nothing before a pass was seen, and when everything is loaded."""
        reader = self._readers.get(threading.get_ident())
        if reader is None or not self._passes or len(self._loaded) == len(self._order):
            return iter(())
        return self.following(reader.last)

    def following(self, key: Hashable) -> Iterator[Hashable]:
        """Give those after `key` in the cycle, but not what was left out."""
        return (other for other in self._after(key) if not self._is_left_out(other))

    def _after(self, key: Hashable) -> Iterator[Hashable]:
        order = self._order
        place = self._place.get(key)
        if place is None:
            return
        for step in range(place + 1, place + len(order)):
            yield order[step % len(order)]
