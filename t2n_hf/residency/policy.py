"""What a pool keeps when its byte budget is exceeded.

A policy sees keys and never values. The pool calls it with its lock held: no method may block.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from typing import Protocol, TypeAlias, final

__all__ = ["Evictable", "FirstFit", "LeastRecent", "Policy", "ResidencyStrategy"]

Evictable: TypeAlias = Callable[[Hashable], bool]


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

    def remove(self, key: Hashable) -> None:
        """Note that `key` will never be used again; its value has left the pool."""

    def keeps(self, key: Hashable) -> bool:
        """Say whether an unused `key` may stay while the budget is held."""

    def victim(self, evictable: Evictable, over: int, beyond: int = -1) -> Hashable | None:
        """Choose which of the loaded values to evict, `over` bytes being too many; None: nothing.

        With `beyond` 0 or more only one that is needed later than `beyond` other values, for certain.
        """

    def upcoming(self) -> Iterator[Hashable]:
        """Give the keys that the calling thread uses next, in order, as far as that is known and of interest."""

    def is_cyclic(self, evictable: Evictable) -> bool:
        """Whether the order is known, and a key that is used now is used again when all others were.

        Of what is `evictable`, nothing is left that is used more seldom.
        """

    def distance(self, key: Hashable) -> int:
        """How many other values are used before `key` is, at least."""

    def following(self, key: Hashable) -> Iterator[Hashable]:
        """Give the keys that are used after `key`, in order, as far as that is known."""


class _Unordered:
    """What policies have in common that do not know what comes next."""

    def expect(self, key: Hashable) -> None:
        """Nothing to note."""

    def upcoming(self) -> Iterator[Hashable]:
        """Not known."""
        return iter(())

    def is_cyclic(self, evictable: Evictable) -> bool:
        """Not known."""
        return False

    def distance(self, key: Hashable) -> int:
        """Not known: it may be next."""
        return 0

    def following(self, key: Hashable) -> Iterator[Hashable]:
        """Not known."""
        return iter(())


@final
class LeastRecent(_Unordered):
    """Evict what was used longest ago."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, key: Hashable) -> None:
        """Make `key` the most recent one, if it is loaded."""
        if key in self._loaded:
            self._loaded.move_to_end(key)

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Make `key` the most recent one."""
        self._loaded[key] = None
        self._loaded.move_to_end(key)

    def forget(self, key: Hashable) -> None:
        """Drop what is known of `key`."""
        self._loaded.pop(key, None)

    remove = forget

    def keeps(self, key: Hashable) -> bool:
        """All of them."""
        return True

    def victim(self, evictable: Evictable, over: int, beyond: int = -1) -> Hashable | None:
        """Choose the least recent one when there is too much."""
        return next(filter(evictable, self._loaded), None) if over > 0 > beyond else None


@final
class FirstFit(_Unordered):
    """Keep the first values that fit into `max_bytes` (None: all of them), for ever; stream the others."""

    def __init__(self, max_bytes: int | None) -> None:
        self._left = max_bytes
        self._admitted: dict[Hashable, int] = {}
        self._streamed: dict[Hashable, None] = {}

    def touch(self, key: Hashable) -> None:
        """Nothing to note: use does not matter."""

    def arrive(self, key: Hashable, nbytes: int) -> None:
        """Admit `key` if it fits beside those admitted before."""
        if key in self._admitted:
            return
        if self._left is not None and nbytes > self._left:
            self._streamed[key] = None
            return
        self._admitted[key] = nbytes
        if self._left is not None:
            self._left -= nbytes

    def forget(self, key: Hashable) -> None:
        """Keep the place of an admitted value: the set is that of the pool's lifetime."""
        self._streamed.pop(key, None)

    def remove(self, key: Hashable) -> None:
        """Give the place of a value free that no longer exists."""
        self._streamed.pop(key, None)
        nbytes = self._admitted.pop(key, 0)
        if self._left is not None:
            self._left += nbytes

    def keeps(self, key: Hashable) -> bool:
        """Only those admitted."""
        return key in self._admitted

    def victim(self, evictable: Evictable, over: int, beyond: int = -1) -> Hashable | None:
        """Choose any value that was not admitted, whether there is too much or not."""
        return next(filter(evictable, self._streamed), None) if beyond < 0 else None
