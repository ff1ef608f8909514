"""Reading ahead: while a value is used, workers load those that the learned order says come next."""

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final, final

from t2n_hf.residency.entry import Entry, Key, LoadState
from t2n_hf.residency.loading import Loading
from t2n_hf.residency.source import Source
from t2n_hf.residency.stream import Stream
from t2n_hf.residency.table import ResidentTable
from t2n_hf.residency.workers import Workers

__all__ = ["Readahead"]

_ADVISED_NBYTES: Final = 64 << 20
_ADVISED_COUNT: Final = 16
_PLANNED_COUNT: Final = 32
# Read too early, a value takes the place of one that would have been used in the meantime.
_REACH: Final = 2


@final
class Readahead:
    """Decides what to read ahead: at most `window` bytes that nobody has used yet, in the order of use.

    Room is made before a value is queued, and only by evicting what is needed later than it: so the budget is held, and
    hardly anything is read twice. Nor is it read much earlier than it has to. A value that is larger than the window is
    read ahead when what is used before it is smaller than the window: its room has to be made in any case. What passes
    (see `Stream`) is not read here.
    """

    def __init__(self, table: ResidentTable, loading: Loading, workers: Workers, window: int, stream: Stream) -> None:
        self._table = table
        self._room = table.room
        self._loading = loading
        self._workers = workers
        self._window = window
        self._passes = stream.passes
        self._unused: list[tuple[Key, int]] = []  # with how many values came before each
        self._advised: set[object] = set()
        self._plans_to_skip = 0
        workers.load = self.load

    def plan(self) -> None:
        """Queue what the calling thread will use next, as far as there is room. Lock held."""
        if self._plans_to_skip:
            self._plans_to_skip -= 1
        else:
            self._plan_now()

    def _plan_now(self) -> None:
        table, between, passing = self._table, 0, 0
        unused = self._unused_nbytes()
        if unused >= self._window:
            return
        for distance, key in enumerate(islice(table.policy.upcoming(), _PLANNED_COUNT)):
            entry = table.entries.get(key)  # type: ignore[call-overload]
            if entry is None:
                source = table.source_at(key)  # type: ignore[arg-type]
                if source is None:
                    continue
                nbytes = source.nbytes
                if self._passes(key, source):  # type: ignore[arg-type]
                    between += nbytes
                    passing += 1
                    if between > _REACH * self._window:
                        # Where all that is not loaded passes, there is nothing to queue until some of it has passed.
                        self._plans_to_skip = 0 if unused else passing - 1
                        return
                    continue
                if unused + nbytes > self._window and not (unused == 0 and self._suits_large(nbytes, between)):
                    return
                if not self._loading.try_room(nbytes, distance):
                    return
                entry = self._queue(key, source, distance)  # type: ignore[arg-type]
                unused += nbytes
            between += entry.nbytes
            if between > _REACH * self._window:
                return

    def _queue(self, key: Key, source: Source, distance: int) -> Entry:
        entry = self._table.enter(key, source)
        self._loading.reserve(entry)
        entry.ahead = True
        self._unused.append((key, distance))
        self._workers.put(entry, source)
        return entry

    def _unused_nbytes(self) -> int:
        """Sum up what was read ahead and not used yet. What was skipped is far away again, and no longer counts."""
        if not self._unused:
            return 0
        entries, distance = self._table.entries, self._table.policy.distance
        nbytes, still = 0, []
        for key, before in self._unused:
            entry = entries.get(key)
            if entry is not None and entry.ahead and distance(key) <= before:
                nbytes += entry.nbytes
                still.append((key, before))
            elif entry is not None and entry.ahead and entry.state is LoadState.QUEUED:
                self._table.withdraw(entry)  # nothing else would give its room back to a lease
        self._unused = still
        return nbytes

    def _suits_large(self, nbytes: int, between: int) -> bool:
        room = self._room
        fits = room.max_bytes is None or room.leased + room.reserved + between + nbytes <= room.max_bytes
        return fits and room.leased + between <= self._window

    def cancel(self) -> bool:
        """Take back what is needed last of what is queued; False when nothing is. Lock held."""
        while self._unused:
            entry = self._table.entries.get(self._unused.pop()[0])
            if entry is not None and entry.ahead and entry.state is LoadState.QUEUED:
                self._table.withdraw(entry)
                return True
        return False

    def load(self, entry: Entry, source: Source) -> None:
        """Load what was queued (for a worker), telling the system first what will be read after it."""
        if entry.ahead and self._loading.pace.is_slow:
            self._advise_after(entry)
        self._loading.load_queued(entry, source)

    def _advise_after(self, entry: Entry) -> None:
        with self._room.lock:
            self._advised.discard(entry.key)
            coming, nbytes = [], 0
            for key in islice(self._table.policy.following(entry.key), _ADVISED_COUNT):
                source = None if key in self._table.entries else self._table.source_at(key)  # type: ignore[arg-type]
                if source is None:
                    continue
                nbytes += source.nbytes
                if nbytes > _ADVISED_NBYTES:
                    break
                if key not in self._advised:
                    self._advised.add(key)
                    coming.append(source)
        for source in coming:
            advise: Callable[[], None] | None = getattr(source, "advise", None)
            if advise is not None:
                with suppress(Exception):  # it was only advice
                    advise()
