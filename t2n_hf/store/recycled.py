"""Memory for values that come and go: given back to the system at once, except a little that is used again.

A general allocator keeps what was freed, in one heap per thread: reading weights on several threads then takes several
times the memory of the values that live. Mapping fresh memory for each read is slow, as the system clears each page.
"""

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import torch

__all__ = ["SMALL_NBYTES", "recycled_buffer"]

SMALL_NBYTES: Final = 256 << 10
_KEPT_NBYTES: Final = 80 << 20
_HUGE_NBYTES: Final = 4 << 20
_MAP_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if hasattr(mmap, "MAP_ANONYMOUS") else None


class _FreeMaps:
    """Mappings that nothing uses, by size; at most `_KEPT_NBYTES` of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, deque[tuple[int, mmap.mmap]]] = {}  # with the thread that gave it, latest last
        self._nbytes = 0

    def take(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            maps = self._maps.get(nbytes)
            if not maps:
                return None
            self._nbytes -= nbytes
            # What this thread gave last is in its caches. What another one gave is in the caches of another core, which
            # makes writing to it several times slower: the longer ago, the better.
            return maps.pop()[1] if maps[-1][0] == threading.get_ident() else maps.popleft()[1]

    def give(self, memory: mmap.mmap) -> None:
        # Called when a value dies, perhaps by the garbage collector in the middle of `take`: it must not wait. A
        # mapping that is not kept is unmapped when its last reference goes.
        if not self._lock.acquire(blocking=False):
            return
        try:
            nbytes = len(memory)
            while self._nbytes + nbytes > _KEPT_NBYTES and self._drop_another(nbytes):
                pass
            if self._nbytes + nbytes <= _KEPT_NBYTES:
                self._maps.setdefault(nbytes, deque()).append((threading.get_ident(), memory))
                self._nbytes += nbytes
        finally:
            self._lock.release()

    def hold(self) -> None:
        """Let no other thread in until `let_go`: a forked child must not find the lock taken by a thread it lacks."""
        self._lock.acquire()

    def let_go(self) -> None:
        """End `hold`."""
        self._lock.release()

    def _drop_another(self, nbytes: int) -> bool:
        """Drop one mapping of another size: sizes that come now are likely to come again."""
        size = next((size for size, maps in self._maps.items() if maps and size != nbytes), None)
        if size is None:
            return False
        self._maps[size].popleft()
        self._nbytes -= size
        return True


_FREE: Final = _FreeMaps()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FREE.hold, after_in_parent=_FREE.let_go, after_in_child=_FREE.let_go)


def recycled_buffer(nbytes: int) -> torch.Tensor | None:
    """Allocate `nbytes` bytes (uint8, 1-D, CPU, not initialised) at the start of a page.

    None for a small one, and where memory cannot be mapped: allocate it as usual.
    """
    if nbytes < SMALL_NBYTES or _MAP_FLAGS is None:
        return None
    memory = _FREE.take(nbytes)
    if memory is None:
        try:
            memory = _mapped(nbytes, _MAP_FLAGS)
        except OSError:
            return None
    owner = np.frombuffer(memory, dtype=np.uint8)
    # The tensor and each view of it keep `owner` alive; when the last one dies the memory is free.
    weakref.finalize(owner, _FREE.give, memory).atexit = False
    return torch.from_numpy(owner)


def _mapped(nbytes: int, flags: int) -> mmap.mmap:
    """Map fresh memory; large pieces in huge pages, which are cleared, read into and multiplied with faster."""
    if nbytes < _HUGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes, flags=flags | getattr(mmap, "MAP_POPULATE", 0))
    memory = mmap.mmap(-1, nbytes, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
