"""Leases: values that stay because a thread uses them, taken together or not at all."""

from contextlib import suppress
from threading import Thread, current_thread
from typing import final

import torch

from t2n_hf.errors import ResidencyError
from t2n_hf.residency.entry import Claim, Entry, LoadState, Wanted, Withdrawn
from t2n_hf.residency.loading import Loading
from t2n_hf.residency.source import Source, version_of
from t2n_hf.residency.table import ResidentTable, stamp_of

__all__ = ["Claims"]


@final
class Claims:
    """Opens and ends claims on the values of one table. `count` is the number of open leases."""

    def __init__(self, table: ResidentTable, loading: Loading) -> None:
        self._table = table
        self._room = table.room
        self._loading = loading
        self.count = 0
        self._open: set[Claim] = set()

    def lease(self, claim: Claim, wanted: Wanted) -> bool:
        """Lease all of `wanted`, in a strict room once there is room; say whether some is yet to load. Lock held.

        What raises leaves a claim that has to be released. Raises InPlaceError when a value was modified in place
        without a lease to do so.
        """
        table, thread = self._table, current_thread()
        if self._room.strict:
            self._admit(claim, wanted, thread)
        else:
            claim.owner = thread
        self._open.add(claim)
        table.refuse_closed()
        missing = False
        for source, device in wanted:
            key = (source.key, device)
            table.policy.touch(key)
            entry = table.find(key, source)
            if entry.state is not LoadState.READY:
                missing = True
            elif entry.stamp != stamp_of(entry.value):
                table.check_unwritten(entry)
            self._lease_one(entry, claim, source)
        return missing

    def _admit(self, claim: Claim, wanted: Wanted, thread: Thread) -> None:
        room = self._room
        grant = room.grants.get(thread)
        if grant is None:
            room.admit(thread, lambda: claim.nested + self._unleased_nbytes(wanted) + self._pinned_nbytes(wanted))
            claim.owner = thread
            room.grant(thread, claim.nested)
        else:
            grant.claims += 1
            claim.owner = thread
            claim.taken = room.take(grant, self._unleased_nbytes(wanted))

    def _unleased_nbytes(self, wanted: Wanted) -> int:
        total = 0
        for source, device in wanted:
            entry = self._table.current((source.key, device), source)  # beside a stale value, a new one takes room
            if entry is None:
                total += source.nbytes
            elif not entry.leases:
                total += entry.nbytes
        return total

    def _pinned_nbytes(self, wanted: Wanted) -> int:
        """Sum up what takes room that is not leased and cannot leave, or will: a stale pinned value is read again."""
        table, keys, total = self._table, {(source.key, device) for source, device in wanted}, 0
        for key in table.pins - keys:
            entry, source = table.entries.get(key), table.source_at(key)
            if source is not None and not (entry is not None and entry.leases):
                total += source.nbytes
        return total

    def _lease_one(self, entry: Entry, claim: Claim, source: Source) -> None:
        if not entry.leases:
            self._room.leased += entry.nbytes
        entry.leases += 1
        entry.ahead = False
        self.count += 1
        if claim.writes:
            entry.writers += 1
            entry.dirty = True
            entry.keep = source
        claim.entries.append(entry)

    def _unlease_one(self, claim: Claim, place: int) -> bool:
        """End a lease; say whether the value may have to go. Lock held."""
        entry = claim.entries[place]
        # An interrupt comes with a call: so all of this is done, or nothing is.
        entry.leases -= 1
        self.count -= 1
        if claim.writes:
            entry.writers -= 1
            entry.dirty = True  # a flush may have stored the value before its last change
        if not entry.leases:
            self._room.leased -= entry.nbytes
        del claim.entries[place]
        if entry.leases:
            return False
        if entry.state is LoadState.QUEUED and not entry.queued:  # nobody else will load it
            self._table.withdraw(entry)
        if entry.detached:
            self._table.free(entry)
            return False
        return self._room.is_oversized(entry.nbytes) or not self._table.policy.keeps(entry.key)

    def reserve_missing(self, claim: Claim) -> None:
        """Put bytes aside for what a claim is about to load, if there is room, before others take it. Lock held."""
        for entry in claim.entries:
            if entry.state is LoadState.QUEUED and not entry.reserved and self._loading.try_room(entry.nbytes):
                self._loading.reserve(entry)

    def load_missing(self, claim: Claim, wanted: Wanted) -> None:
        """Load what a claim lacks, or wait for who loads it. Raises what loading raises."""
        for place, (source, _) in enumerate(wanted):
            while (entry := self._to_load(claim, place, source)) is not None:
                self._loading.load(entry, source)

    def _to_load(self, claim: Claim, place: int, source: Source) -> Entry | None:
        """Wait while another thread loads an entry; give it if this one has to."""
        with self._room.lock:
            while True:
                entry = claim.entries[place]
                if entry.state is LoadState.READY:
                    return None
                if entry.state is LoadState.FAILED:  # another thread's read failed: this one tries itself
                    self._unlease_one(claim, place)
                    self._lease_one(self._table.find(entry.key, source), claim, source)
                    claim.entries.insert(place, claim.entries.pop())
                elif entry.state is LoadState.QUEUED:
                    return entry
                else:
                    self._room.sleep()

    def release(self, claim: Claim) -> None:
        """End a claim; does nothing when it is not open.

        Raises StorageError when what must go cannot be written back, ResidencyError when what was leased for writing
        was overwritten meanwhile, so that changes are lost.
        """
        try:
            self._release(claim)
        except BaseException:
            self._release(claim)  # what an interrupt has left of it
            raise

    def _release(self, claim: Claim) -> None:
        room = self._room
        with room.lock:
            if claim.owner is None:
                return
            entries = list(claim.entries)
            if claim.owner is current_thread():
                for entry in entries:
                    self._loading.give_up(entry, Withdrawn(f"the load of {entry.name} was interrupted"))
            for entry in entries if claim.writes else ():
                if entry.is_overtaken and not entry.detached:
                    self._table.drop(entry)
            shrink = self._end(claim) or room.over(0) > 0
            overtaken = claim.writes and any(e.detached and e.state is LoadState.READY for e in entries)
        if shrink:
            self._table.shrink()
        if overtaken:
            raise ResidencyError(
                f"{entries[0].name} was overwritten while a read_write lease was open: what was changed through the "
                "lease is lost; do one or the other"
            )

    def _end(self, claim: Claim) -> bool:
        """End all leases of a claim; say whether a value may have to go. Lock held."""
        shrink = False
        while claim.entries:
            shrink = self._unlease_one(claim, -1) or shrink
        if self._room.strict and claim.owner is not None:
            self._room.give_back(claim.owner, claim.taken)
        claim.owner, claim.taken = None, 0
        self._open.discard(claim)
        self._room.wake()
        return shrink

    def end_others(self) -> None:
        """End the claims of all threads but the calling one, which a forked child does not have. Lock held."""
        for claim in [claim for claim in self._open if claim.owner is not current_thread()]:
            self._end(claim)

    # ---- reads without a lease ------------------------------------------------------------------------------------

    def resolve(self, source: Source, device: torch.device) -> torch.Tensor:
        """Give a value, loaded if need be; it may leave the pool at once. Raises StorageError."""
        key = (source.key, device)
        entry = self._table.entries.get(key)
        if entry is not None and entry.leases and entry.version == version_of(source):
            # A leased value stays where it is: no need for the lock, nor to say that it is used.
            value = entry.value
            if value is not None and entry.stamp == stamp_of(value):
                return value
        while True:
            with self._room.lock:
                self._table.refuse_closed()
                self._table.policy.touch(key)
                entry = self._table.find(key, source)
                entry.ahead = False
                while entry.state is LoadState.LOADING:
                    self._room.sleep()
                if entry.state is LoadState.READY:
                    if entry.value is None:  # it has left the table again
                        return entry.loaded.result()
                    self._table.check_unwritten(entry)
                    return entry.value
            found = self._loading.load(entry, source)
            if found is not None:
                self._table.shrink()
                return found

    def hasten(self, source: Source, device: torch.device) -> None:
        """Load a queued value in the calling thread, which waits for it, unless a worker has begun to."""
        entry = self._table.entries.get((source.key, device))
        if entry is not None:
            with suppress(Exception):  # the handle raises it
                self._loading.load(entry, source, hand=True)
                self._table.shrink()
