"""The values that a pool holds: finding, eviction and write-back, under one lock and one byte budget."""

import weakref
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from functools import partial
from typing import Final, final
from weakref import WeakValueDictionary

import torch

from t2n_hf.errors import InPlaceError, ResidencyError
from t2n_hf.residency.entry import Entry, Key, LoadState, Withdrawn
from t2n_hf.residency.policy import Policy
from t2n_hf.residency.room import Room
from t2n_hf.residency.source import Source, replace_in, version_of

__all__ = ["ResidentTable", "stamp_of"]

_OF_NO_SOURCE: Final = -1


def stamp_of(value: torch.Tensor | None) -> int:
    """Give torch's count of writes to a value."""
    # Opaque values guard their own writes, and inference tensors count none.
    return value._version if type(value) is torch.Tensor and not value.is_inference() else 0


@final
class ResidentTable:
    """Entries by (source key, device).

    `room.lock` is the one lock; methods that say "lock held" expect it, all others take it. Values are written back
    outside of it. A value whose source no longer exists (its tensor is gone) leaves the table.
    """

    def __init__(self, room: Room, policy: Policy) -> None:
        self.room = room
        self.policy = policy
        self.entries: dict[Key, Entry] = {}
        self.pins: set[Key] = set()
        self._oversized: dict[Key, None] = {}
        self._keys: dict[Hashable, set[Key]] = {}
        self._handed: WeakValueDictionary[tuple[Key, int], Future[torch.Tensor]] = WeakValueDictionary()
        self._sources: dict[Key, weakref.ref[Source]] = {}
        self._orphans: deque[Key] = deque()
        self.closed = False

    def refuse_closed(self) -> None:
        """Raise ResidencyError when nothing is to come into the table any more. Lock held."""
        if self.closed:
            raise ResidencyError("the residency pool is closed; make another one")

    # ---- finding values -------------------------------------------------------------------------------------------

    def find(self, key: Key, source: Source) -> Entry:
        """Give the entry of a key, a new one (QUEUED) if it has none or a stale value. Lock held."""
        entry = self.entries.get(key)
        if entry is not None and entry.version == version_of(source):
            return entry
        self.await_written(key, source)
        return self.current(key, source) or self.enter(key, source)

    def await_written(self, key: Key, source: Source) -> None:
        """Wait while a value is written back whose source changed: only the end tells whether by that. Lock held."""
        while (entry := self.entries.get(key)) is not None and entry.writing and entry.version != version_of(source):
            self.room.sleep()
        self.refuse_closed()

    def current(self, key: Key, source: Source) -> Entry | None:
        """Find the entry of a key, unless its value is stale: then it leaves the table. Lock held."""
        entry = self.entries.get(key)
        if entry is None or entry.state is LoadState.QUEUED or entry.writing or entry.version == version_of(source):
            return entry
        # Changes that were not written back are part of the newer value, or were overwritten by it.
        self.drop(entry)
        return None

    def enter(self, key: Key, source: Source) -> Entry:
        """Put a key into the table, QUEUED. Lock held."""
        self.bury()
        if key not in self._sources:
            self._sources[key] = weakref.ref(source, partial(_bury_or_note, weakref.ref(self), key))
        self._keys.setdefault(key[0], set()).add(key)
        self.entries[key] = entry = Entry(
            key=key, nbytes=source.nbytes, version=version_of(source), state=LoadState.QUEUED
        )
        return entry

    def handed(self, key: Key, version: int) -> "Future[torch.Tensor] | None":
        """Give the load of a value that left the table and that a living handle has; None without one. Lock held."""
        found = self._handed.get((key, version))
        return found if found is not None and found.done() and found.exception() is None else None

    def check_unwritten(self, entry: Entry) -> None:
        """Raise InPlaceError, and forget the value, when it was modified without a lease to do so. Lock held."""
        if entry.stamp == stamp_of(entry.value) or entry.dirty or entry.writers or entry.writing:
            return
        self.drop(entry)
        raise InPlaceError(
            f"the resident value of {entry.name} was modified in place without a lease of mode 'read_write'; the "
            "change is dropped: acquire it with mode='read_write', or work on a copy"
        )

    def keys_of(self, source: Source) -> list[Key]:
        """Keys of the table that belong to a source, one per device. Lock held."""
        return list(self._keys.get(source.key, ()))

    # ---- values whose tensors are gone ----------------------------------------------------------------------------

    def source_at(self, key: Key) -> Source | None:
        """Give the source of a key that was in the table once, None when it is gone. Lock held."""
        found = self._sources.get(key)
        return None if found is None else found()

    def bury(self) -> None:
        """Drop what no tensor has any more. Lock held."""
        while self._orphans:
            key = self._orphans.popleft()
            self._sources.pop(key, None)
            self.pins.discard(key)
            entry = self.entries.get(key)
            if entry is not None:
                self.drop(entry)
            self.policy.remove(key)

    # ---- eviction -------------------------------------------------------------------------------------------------

    def _is_evictable(self, key: Hashable) -> bool:
        entry = self.entries.get(key)  # type: ignore[call-overload]
        return entry is not None and entry.is_idle and key not in self.pins

    def is_cyclic(self) -> bool:
        """Whether what there is no room for had better not take that of others, see `Policy.is_cyclic`. Lock held."""
        return self.policy.is_cyclic(self._is_evictable)

    def victim(self, needed: int, beyond: int = -1) -> Entry | None:
        """Choose what to evict so that `needed` bytes fit, see `Policy.victim`; None: nothing can go. Lock held."""
        if self._oversized:
            found = next(filter(self._is_evictable, self._oversized), None)
            if found is not None:
                return self.entries[found]
        over = self.room.over(needed)
        chosen = self.policy.victim(self._is_evictable, over, beyond)
        return None if chosen is None else self.entries[chosen]  # type: ignore[index]

    def shrink(self) -> None:
        """Evict what is too much, as far as it can go. Raises StorageError."""
        while True:
            with self.room.lock:
                victim = self.victim(0)
                if victim is None:
                    return
                left = self.try_drop(victim)
            if not left:
                self.write_back(victim)

    def try_drop(self, entry: Entry) -> bool:
        """Drop an idle entry; False when it has to be written back first (by who asked). Lock held."""
        if entry.dirty and not entry.is_overtaken:
            return False
        self.drop(entry)
        return True

    def admit(self, entry: Entry) -> None:
        """Let the policy know of a value that was loaded. Lock held."""
        self.policy.arrive(entry.key, entry.nbytes)
        if self.room.is_oversized(entry.nbytes):
            self._oversized[entry.key] = None

    def drop(self, entry: Entry) -> None:
        """Take an entry out of the table; its bytes count until its last lease ends. Lock held."""
        is_here = self.entries.get(entry.key) is entry  # a stale one that is still being loaded may have left before
        self.free(entry)
        # An interrupt comes with a call: what matters is done before the next one.
        entry.detached = True
        if is_here:
            del self.entries[entry.key]
            keys = self._keys[entry.key[0]]
            keys.discard(entry.key)
            if not keys:
                del self._keys[entry.key[0]]
            self.policy.forget(entry.key)
            self._oversized.pop(entry.key, None)
        if entry.state is LoadState.READY:
            self._handed[entry.key, entry.version] = entry.loaded

    def withdraw(self, entry: Entry) -> None:
        """Take back an entry that nobody has begun to load. Lock held."""
        self.fail(entry, Withdrawn(f"{entry.name} was taken back before it was loaded"))

    def fail(self, entry: Entry, error: BaseException) -> None:
        """Forget an entry that could not be loaded. Lock held."""
        self.end_load(entry)
        entry.state, entry.version = LoadState.FAILED, _OF_NO_SOURCE
        try:
            self.pins.discard(entry.key)
            self.drop(entry)
        finally:
            entry.loaded.set_exception(error)
            self.room.wake()

    def end_load(self, entry: Entry) -> None:
        """Put no bytes aside for an entry any more, and have nobody wait for it. Lock held."""
        self.room.reserved -= entry.reserved
        self.room.busy -= entry.reading
        entry.reserved, entry.reading = 0, False

    def free(self, entry: Entry) -> None:
        """Let go of the value of an entry that left the table, unless it is in use. Lock held."""
        if entry.is_idle and entry.value is not None:
            entry.value = None
            self.room.loaded -= entry.nbytes

    # ---- writing back ---------------------------------------------------------------------------------------------

    def write_back(self, entry: Entry) -> bool:
        """Store a modified value; False when another thread does, or has. Raises StorageError."""
        begun, failed, version, stamp = False, True, None, entry.stamp
        try:
            with self.room.lock:
                if entry.writing or entry.detached or not entry.dirty:
                    return False
                entry.writing, entry.dirty = True, False
                self.room.busy += 1
                begun = True
            version = replace_in(entry.keep, entry.value, entry.version)  # type: ignore[arg-type]
            failed, stamp = False, stamp_of(entry.value)
            return True
        finally:
            if begun:
                with self.room.lock:
                    self.room.busy -= 1
                    entry.writing = False
                    entry.dirty = entry.dirty or failed or entry.writers > 0
                    if version is not None:  # else a newer value was stored, and this one is stale
                        entry.version, entry.stamp = version, stamp
                    if not entry.dirty:
                        entry.keep = None
                    self.room.wake()

    def settle(self, key: Key, remove: bool) -> None:
        """Wait until a key is neither loaded nor written, then write it back if it is dirty, and remove it if told."""
        while True:
            with self.room.lock:
                entry = self.entries.get(key)
                if entry is None:
                    return
                if entry.state is LoadState.QUEUED and self._may_stay_queued(entry):
                    # Nothing is loaded that could be lost.
                    if remove:
                        self.withdraw(entry)
                    return
                if entry.state is not LoadState.READY or entry.writing:
                    self.room.sleep()
                    continue
                if self._is_settled(entry, remove):
                    return
            if self.write_back(entry) and not remove:
                return

    def _may_stay_queued(self, entry: Entry) -> bool:
        """Say whether an entry waits for room, perhaps for that of the calling thread, or for no worker. Lock held."""
        return (self.room.strict and not entry.reserved) or not (entry.queued or entry.leases)

    def _is_settled(self, entry: Entry, remove: bool) -> bool:
        """Say whether there is nothing to write back; then the entry leaves the table if told. Lock held."""
        if remove:
            self._refuse_in_use(entry)
        if entry.dirty and not entry.is_overtaken:
            return False
        if remove or entry.dirty:  # what was changed is lost: a newer value was stored
            self.drop(entry)
        return True

    def _refuse_in_use(self, entry: Entry) -> None:
        if entry.leases:
            raise ResidencyError(f"{entry.name} has {entry.leases} open leases; release them before evicting it")
        if entry.key in self.pins:
            raise ResidencyError(f"{entry.name} is pinned; unpin it before evicting it")


def _bury_or_note(table_of: "weakref.ref[ResidentTable]", key: Key, _: object) -> None:
    # Called when a source dies, perhaps by the garbage collector while this very thread holds the lock: no waiting.
    table = table_of()
    if table is None:
        return
    table._orphans.append(key)
    if table.room.lock.acquire(blocking=False):
        try:
            table.bury()
        finally:
            table.room.lock.release()
