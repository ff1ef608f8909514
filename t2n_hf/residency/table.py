"""The values that a pool holds: loading, eviction and write-back under one lock and one byte budget."""

from collections.abc import Hashable
from concurrent.futures import Future
from threading import Condition, Lock
from typing import final
from weakref import WeakValueDictionary

import torch

from t2n_hf.errors import InPlaceError, ResidencyError, StorageError, T2NError
from t2n_hf.residency.entry import Entry, LoadState
from t2n_hf.residency.policy import Policy
from t2n_hf.residency.source import Source, version_of

__all__ = ["ResidentTable"]


def _read(source: Source, device: torch.device) -> torch.Tensor:
    try:
        return source.load(device)
    except OSError as error:
        if isinstance(error, T2NError):
            raise
        raise StorageError(f"{source.key}: cannot be read: {error}") from error


def _stamp_of(value: torch.Tensor | None) -> int:
    # Opaque values guard their own writes, and inference tensors count none.
    return value._version if type(value) is torch.Tensor and not value.is_inference() else 0


@final
class ResidentTable:
    """Entries by (source key, device), and what they weigh.

    `changed` is the one lock; methods that say "lock held" expect it, all others take it. Values are read and written
    outside of it. `nbytes` counts the values that are loaded, those that left the table but are still leased included;
    `reserved` those that are being loaded.
    """

    def __init__(self, max_bytes: int | None, policy: Policy) -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        self.changed = Condition(Lock())
        self.entries: dict[Hashable, Entry] = {}
        self.pins: set[Hashable] = set()
        self.nbytes = 0
        self.reserved = 0
        self._handed: WeakValueDictionary[Hashable, Future[torch.Tensor]] = WeakValueDictionary()

    def hold(self, source: Source, device: torch.device) -> Entry:
        """Find or load a value and keep it from eviction until `let_go` (counted in `waiting`)."""
        key = (source.key, device)
        with self.changed:
            self.policy.touch(key)
            while True:
                entry = self.current(key, source) or self.enter(key, source, device)
                entry.waiting += 1
                if entry.state is LoadState.QUEUED:
                    self._begin_load(entry)
                    break
                self._wait_for_load(entry)
                if entry.state is LoadState.READY:
                    self._check_unwritten(entry)
                    return entry
                entry.waiting -= 1
        self.load(entry)
        return entry

    def _wait_for_load(self, entry: Entry) -> None:
        try:
            self.changed.wait_for(lambda: entry.state is not LoadState.LOADING)
        except BaseException:  # an interrupt must not leave a claim behind
            entry.waiting -= 1
            raise

    def _check_unwritten(self, entry: Entry) -> None:
        """Raise InPlaceError, and forget the value, when it was modified without a lease to do so. Lock held."""
        if entry.stamp == _stamp_of(entry.value) or entry.dirty or entry.writers or entry.writing:
            return
        entry.waiting -= 1
        self.drop(entry)
        raise InPlaceError(
            f"the resident value of {entry.source.key} was modified in place without a lease of mode 'read_write'; the "
            "change is dropped: acquire it with mode='read_write', or work on a copy"
        )

    def let_go(self, entry: Entry) -> None:
        """End a hold, and evict what is too much. Raises StorageError when what must go cannot be written back."""
        with self.changed:
            entry.waiting -= 1
            if entry.detached:
                self._free(entry)
            self.changed.notify_all()
            shrink = self._over(0) > 0 or not self.policy.keeps(entry.key)
        if shrink:
            self.shrink()

    def current(self, key: Hashable, source: Source) -> Entry | None:
        """Find the entry of a key, unless its value is stale: then it leaves the table. Lock held."""
        entry = self.entries.get(key)
        if entry is None or entry.state is LoadState.QUEUED or entry.writing:
            return entry
        if entry.version == version_of(source):
            return entry
        # Changes that were not written back are part of the newer value, or were overwritten by it.
        self.drop(entry)
        return None

    def handed(self, key: Hashable, version: int) -> "Future[torch.Tensor] | None":
        """Give the load of a value that left the table and that a living handle has; None without one. Lock held."""
        found = self._handed.get((key, version))
        return found if found is not None and found.done() and found.exception() is None else None

    def enter(self, key: Hashable, source: Source, device: torch.device) -> Entry:
        """Put a key into the table: READY if a living handle has its value, else QUEUED. Lock held."""
        version = version_of(source)
        entry = Entry(
            key=key, source=source, device=device, nbytes=source.nbytes, version=version, state=LoadState.QUEUED
        )
        handed = self.handed(key, version)
        if handed is not None:
            entry.loaded, entry.value, entry.state = handed, handed.result(), LoadState.READY
            entry.stamp = _stamp_of(entry.value)
            self.nbytes += entry.nbytes
            self.policy.arrive(key, entry.nbytes)
        self.entries[key] = entry
        return entry

    def _begin_load(self, entry: Entry) -> None:
        """Let the calling thread be the one that loads. Lock held."""
        entry.state, entry.version = LoadState.LOADING, version_of(entry.source)

    def load_queued(self, entry: Entry) -> None:
        """Load an entry on a worker, unless somebody who could not wait has begun to. Never raises."""
        with self.changed:
            if entry.state is not LoadState.QUEUED:
                return
            self._begin_load(entry)
        try:
            self.load(entry, ahead=True)
            self.shrink()
        except Exception:  # noqa: BLE001 - the handle gives it to whoever waits; a later access meets its own
            return

    def load(self, entry: Entry, ahead: bool = False) -> None:
        """Load an entry that the calling thread has set to LOADING; `ahead`: before anybody needs it.

        Raises what the source raises; the entry is then forgotten.
        """
        try:
            # A value that is too large to be retained shall not displace the others before anybody needs it.
            kept = not (ahead and self._is_oversized(entry.nbytes)) or entry.key in self.pins
            entry.reserved = self.shrink(entry.nbytes) if kept else 0
            value = _read(entry.source, entry.device)
        except BaseException as error:
            with self.changed:
                self.reserved -= entry.reserved
                entry.state = LoadState.FAILED
                self.pins.discard(entry.key)
                self.drop(entry)
                entry.loaded.set_exception(error)
                self.changed.notify_all()
            raise
        with self.changed:
            self.reserved -= entry.reserved
            # Only now does a source surely know what its value takes.
            entry.value, entry.nbytes, entry.state = value, entry.source.nbytes, LoadState.READY
            entry.stamp = _stamp_of(value)
            self.nbytes += entry.nbytes
            self.policy.arrive(entry.key, entry.nbytes)
            entry.loaded.set_result(value)
            if entry.detached:
                self._free(entry)
            self.changed.notify_all()

    def _is_oversized(self, nbytes: int) -> bool:
        return self.max_bytes is not None and nbytes > self.max_bytes

    def _over(self, needed: int) -> int:
        """Bytes above the budget when `needed` more come. Lock held."""
        return 0 if self.max_bytes is None else self.nbytes + self.reserved + needed - self.max_bytes

    def shrink(self, reserve: int = 0) -> int:
        """Evict until `reserve` more bytes fit, or nothing more can go; reserve them. Raises StorageError."""
        while True:
            with self.changed:
                victim = self._victim(reserve)
                if victim is None:
                    self.reserved += reserve
                    return reserve
                if not victim.dirty:
                    self.drop(victim)
                    continue
                victim.writing, victim.dirty = True, False
            self._write_back(victim)

    def _victim(self, needed: int) -> Entry | None:
        over = self._over(needed)
        idle = {e.key: e for e in self.entries.values() if e.is_idle and e.key not in self.pins}
        oversized = next((entry for entry in idle.values() if self._is_oversized(entry.nbytes)), None)
        if oversized is not None:
            return oversized
        chosen = self.policy.victim(list(idle), over)
        return None if chosen is None else idle[chosen]

    def drop(self, entry: Entry) -> None:
        """Take an entry out of the table; its bytes count until its last lease ends. Lock held."""
        if self.entries.get(entry.key) is entry:  # a stale one that is still being loaded may have left before
            del self.entries[entry.key]
        entry.detached = True
        self.policy.forget(entry.key)
        if entry.state is LoadState.READY:
            self._handed[(entry.key, entry.version)] = entry.loaded
        self._free(entry)

    def _free(self, entry: Entry) -> None:
        """Let go of the value of an entry that left the table, unless it is in use. Lock held."""
        if entry.is_idle and entry.value is not None:
            entry.value = None
            self.nbytes -= entry.nbytes

    def _write_back(self, entry: Entry) -> None:
        """Store a value; who calls has set `writing` and cleared `dirty` under the lock."""
        failed = True
        try:
            entry.source.store(entry.value)  # type: ignore[attr-defined]
            failed = False
        finally:
            with self.changed:
                entry.writing = False
                entry.dirty = entry.dirty or failed or entry.writers > 0
                if not failed:
                    entry.version, entry.stamp = version_of(entry.source), _stamp_of(entry.value)
                self.changed.notify_all()

    def settle(self, key: Hashable, remove: bool) -> None:
        """Wait until a key is neither loaded nor written, then write it back if it is dirty, and remove it if told."""
        while True:
            with self.changed:
                entry = self.entries.get(key)
                if entry is None:
                    return
                busy = entry.state is not LoadState.READY or entry.writing
                if busy or (remove and entry.waiting):
                    self.changed.wait()
                    continue
                if remove:
                    self._refuse_in_use(entry)
                if not entry.dirty:
                    if remove:
                        self.drop(entry)
                    return
                entry.writing, entry.dirty = True, False
            self._write_back(entry)
            if not remove:
                return

    def keys_of(self, source: Source) -> list[Hashable]:
        """Keys of the table that belong to a source, one per device. Lock held."""
        return [key for key in self.entries if key[0] == source.key]  # type: ignore[index]

    def _refuse_in_use(self, entry: Entry) -> None:
        if entry.leases:
            raise ResidencyError(f"{entry.source.key} has {entry.leases} open leases; release them before evicting it")
        if entry.key in self.pins:
            raise ResidencyError(f"{entry.source.key} is pinned; unpin it before evicting it")
