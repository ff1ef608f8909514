"""How values come into a pool: room is made, they are read outside the lock, and failures are forgotten."""

import time
from collections.abc import Callable
from threading import current_thread
from typing import Final, final

import torch

from t2n_hf.errors import StorageError, T2NError
from t2n_hf.residency.entry import Entry, LoadState
from t2n_hf.residency.room import Patience
from t2n_hf.residency.source import Source, version_of
from t2n_hf.residency.table import ResidentTable, stamp_of

__all__ = ["Loading", "Pace"]

SLOW_BYTES_PER_S: Final = 1.5e9
TELLING_NBYTES: Final = 64 << 10
_MEMORY: Final = 0.9


def _read(source: Source, device: torch.device) -> torch.Tensor:
    try:
        return source.load(device)
    except OSError as error:
        if isinstance(error, T2NError):
            raise
        raise StorageError(f"{source.key}: cannot be read: {error}") from error


@final
class Pace:
    """How fast values were read lately: from the page cache, or from something slower."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Count one read, unless it is too small to tell; older ones count less and less."""
        if nbytes < TELLING_NBYTES:
            return
        self._nbytes = _MEMORY * self._nbytes + nbytes
        self._seconds = _MEMORY * self._seconds + seconds

    @property
    def is_slow(self) -> bool:
        """Whether a thread spends its time waiting for the bytes, and not copying them."""
        return self._nbytes < SLOW_BYTES_PER_S * self._seconds


@final
class Loading:
    """Loads entries of one table.

    Methods that say "lock held" expect the lock of the table's room, all others take it. `cancel` takes back one value
    that is queued to be read ahead, and says whether there was one; it is called with the lock held.
    """

    def __init__(self, table: ResidentTable) -> None:
        self._table = table
        self._room = table.room
        self.pace = Pace()
        self.cancel: Callable[[], bool] = lambda: False

    def begin(self, entry: Entry, source: Source) -> None:
        """Let the calling thread be the one that loads. Lock held."""
        entry.state, entry.version, entry.loader = LoadState.LOADING, version_of(source), current_thread()
        if entry.reserved:
            self._about_to_read(entry)

    def _about_to_read(self, entry: Entry) -> None:
        """Let others wait for the room that this entry has: the loading thread waits for nothing more. Lock held."""
        self._room.busy += not entry.reading
        entry.reading = True

    def load(self, entry: Entry, source: Source, hand: bool = False) -> torch.Tensor | None:
        """Load an entry that the calling thread needs now; None when another thread has begun to.

        With `hand`, no room is made for what is too large to be kept. Raises what the source raises.
        """
        try:
            with self._room.lock:
                if entry.state is not LoadState.QUEUED:
                    return None
                self.begin(entry, source)
                has_room = entry.reserved or (hand and self.streams(entry))
            if not has_room:
                self._make_room(entry, source)
            return self._read_into(entry, source)
        except BaseException as error:
            with self._room.lock:
                self.give_up(entry, error)
            raise

    def give_up(self, entry: Entry, error: BaseException) -> None:
        """Forget an entry whose load the calling thread has begun, but was interrupted in. Lock held."""
        if entry.state is LoadState.LOADING and entry.loader is current_thread():
            self._table.fail(entry, error)

    def load_queued(self, entry: Entry, source: Source) -> None:
        """Load an entry on a worker, unless somebody who could not wait has begun to. Never raises."""
        try:
            with self._room.lock:
                if entry.state is not LoadState.QUEUED:
                    return
                # Who waits for it must be able to load it while a strict room has the worker wait.
                begun = entry.reserved or self.streams(entry)
                if begun:
                    self.begin(entry, source)
            if begun or self._make_room(entry, source, queued=True):
                self._read_into(entry, source)
                self._table.shrink()
        except BaseException as error:  # noqa: BLE001 - the handle gives it to whoever waits; a later access meets its own
            with self._room.lock:
                if entry.state is LoadState.QUEUED:
                    self._table.fail(entry, error)
                self.give_up(entry, error)

    def streams(self, entry: Entry) -> bool:
        """Say whether a prefetch is handed on without displacing others: it is too large to be retained. Lock held."""
        return not self._room.strict and self._room.is_oversized(entry.nbytes) and entry.key not in self._table.pins

    def _read_into(self, entry: Entry, source: Source) -> torch.Tensor:
        room = self._room
        with room.lock:
            found = self._table.handed(entry.key, entry.version)
            self._about_to_read(entry)
        start = time.monotonic()
        value = _read(source, entry.key[1]) if found is None else found.result()
        seconds = time.monotonic() - start
        with room.lock:
            # Only now does a source surely know what its value takes.
            nbytes, stamp = source.nbytes, stamp_of(value)
            if found is None:
                self.pace.note(nbytes, seconds)
            if entry.leases:
                room.leased += nbytes - entry.nbytes
            entry.nbytes = nbytes
            if not entry.detached:
                self._table.admit(entry)
            self._table.end_load(entry)
            # An interrupt comes with a call: it finds a value that is loaded, or one that is not.
            entry.value, entry.state, entry.stamp = value, LoadState.READY, stamp
            room.loaded += nbytes
            try:
                room.reserve(0)
                if entry.detached:
                    self._table.free(entry)
            finally:
                entry.loaded.set_result(value)
                room.wake()
        return value

    # ---- room -----------------------------------------------------------------------------------------------------

    def reserve(self, entry: Entry) -> None:
        """Put bytes aside for an entry. Lock held."""
        self._room.reserve(entry.nbytes)
        entry.reserved = entry.nbytes

    def try_room(self, nbytes: int, beyond: int = -1) -> bool:
        """Make room for `nbytes` bytes if that can be done at once, see `Policy.victim`. Lock held."""
        while self._room.over(nbytes) > 0:
            victim = self._table.victim(nbytes, beyond)
            if victim is None or victim.dirty:
                return False
            self._table.drop(victim)
        return True

    def _make_room(self, entry: Entry, source: Source, queued: bool = False) -> bool:
        """Evict until an entry fits, or nothing more can go; reserve its bytes. Raises StorageError.

        `queued`: for a worker, which begins the load once there is room; False when another thread did so before.
        """
        patience = Patience()
        while True:
            with self._room.lock:
                if queued and entry.state is not LoadState.QUEUED:
                    return False
                if entry.reserved:  # a claim found room meanwhile, and has not begun
                    self.begin(entry, source)
                    return True
                victim = self._table.victim(entry.nbytes)
                if victim is None:
                    if self._room.over(entry.nbytes) > 0 and self._waited(patience, queued):
                        continue
                    self.reserve(entry)
                    if queued:
                        self.begin(entry, source)
                    self._about_to_read(entry)
                    return True
                left = self._table.try_drop(victim)
            if not left:
                self._table.write_back(victim)

    def _waited(self, patience: Patience, queued: bool) -> bool:
        """Wait once for room that others will give free; False when there is none to wait for. Lock held."""
        room, thread = self._room, current_thread()
        if self.cancel():
            return True
        ends = room.busy or room.is_passing()
        if not room.strict or not (ends or (thread not in room.grants and room.others_hold(thread))):
            return False
        if queued:
            room.sleep()
            return True
        return room.wait_for_others(patience)
