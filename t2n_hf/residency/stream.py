"""Values for which there is no room pass through a little memory, piece by piece, while they are used."""

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Condition, Lock, current_thread
from time import monotonic
from typing import Final, TypeAlias, final

import torch

from t2n_hf.residency.entry import Claim, Key, Wanted
from t2n_hf.residency.loading import Loading
from t2n_hf.residency.source import Source, Steps, version_of
from t2n_hf.residency.table import ResidentTable

__all__ = ["STREAM_NBYTES", "Stream"]

# What was read last is in the cache of the CPU when it is used, and so is the memory that is read into next.
_SLOT_NBYTES: Final = 4 << 20
_SLOT_COUNT: Final = 4
STREAM_NBYTES: Final = _SLOT_COUNT * _SLOT_NBYTES
# Of a smaller budget, the slots would take too much.
_LEAST_BUDGET: Final = 2 * STREAM_NBYTES
_IDLE_S: Final = 0.02
_PLANNED: Final = 2
_LONGEST_WAIT_S: Final = 1.0
_CPU: Final = torch.device("cpu")

Use: TypeAlias = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Step:
    """Some rows of a value, to be read or read."""

    source: Source
    version: int
    steps: Steps
    at: int = 0

    def is_at(self, other: "_Step") -> bool:
        """Whether both are the same rows of the same value."""
        return (self.source, self.version, self.at) == (other.source, other.version, other.at)


@dataclass(slots=True, eq=False)
class _Read:
    """A step that one thread reads into `slot`; `turn` counts how often the stream had been turned when it began.

    `rows` are there when `done`; None then says that they could not be read. `mine` says that who uses the values reads
    it. `reading` is held until it has ended: an interrupt of who waits for that leaves nothing behind, which cannot be
    said of a Condition.
    """

    step: _Step
    slot: torch.Tensor
    turn: int
    mine: bool
    rows: torch.Tensor | None = None
    done: bool = False
    reading: Lock = field(default_factory=Lock)


@final
class Stream:
    """Reads values in pieces, in the learned order, a few pieces before they are used.

    A value passes when the order is known, there is no room for it, and its source can be read in steps: whatever would
    have to leave memory for it is needed sooner than it is needed again. So the same values stay in memory, pass after
    pass. All pieces take turns in a few slots, which stay in the cache of the CPU: reading into them takes half as long
    as into fresh memory. A thread reads ahead; who uses the values reads the next piece rather than to wait for one.
    Two threads that read keep a disk busier than advice to the system does, which is why none is given. Only one thread
    uses the stream at a time; others have their values loaded.

    Each piece is read from a file that was not changed since it was opened, else reading fails; who uses a value starts
    anew then, and loads it. The slots are taken from the budget, and given back when who needs room asks for it.
    """

    def __init__(self, table: ResidentTable, loading: Loading) -> None:
        self._table = table
        self._room = table.room
        self._loading = loading
        self._slots: list[torch.Tensor] = []
        self._threads: ThreadPoolExecutor | None = None
        # What was left to pass, and was not asked for in pieces since: a module that uses it in another way than as the
        # rows of a product has it leased, and read ahead, from then on.
        self._unasked: set[Key] = set()
        self.renew()

    def renew(self) -> None:
        """Begin anew: a forked child does not have its parent's thread, nor its place."""
        # `with` a Condition itself may leave it locked when it is interrupted.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._threads = None
        self._has_thread = False
        self._is_whole = True
        self._turn = self._taken = self._begun = 0
        self._plan: deque[_Step] = deque()
        self._last: _Step | None = None
        self._reads: dict[int, _Read] = {}
        self._busy: list[_Read] = []
        self._free = list(self._slots)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the budget that the slots take."""
        return STREAM_NBYTES if self._slots else 0

    # ---- what passes ----------------------------------------------------------------------------------------------

    def passes(self, key: Key, source: Source) -> bool:
        """Say whether a value is not loaded but used in pieces. Lock held."""
        table, most = self._table, self._room.max_bytes
        if table.closed or most is None or most < _LEAST_BUDGET:
            return False
        if key in table.entries or key in table.pins or key[1] != _CPU:
            return False
        if key in self._unasked or table.source_at(key) is not source:  # it would not be found when its turn comes
            return False
        return self._room.over(source.nbytes) > 0 and table.is_cyclic() and _steps_of(source) is not None

    def left(self, claim: Claim, wanted: Wanted) -> Wanted:
        """Give those of `wanted` that have to be leased; the others are noted as used. Lock held."""
        if claim.whole:
            return wanted
        left = []
        for source, device in wanted:
            key = (source.key, device)
            if self.passes(key, source):
                self._table.policy.touch(key)
                self._unasked.add(key)
            else:
                left.append((source, device))
        return left

    # ---- using a value --------------------------------------------------------------------------------------------

    def use(self, source: Source, device: torch.device, use: Use) -> bool:
        """Call `use` with all rows of a value, some at a time; False when it does not pass, or reading failed.

        `use` must not keep what it is given, nor use a value itself. What it made of the rows is worth nothing when
        False comes back.
        """
        self._unasked.discard((source.key, device))
        if (source.key, device) in self._table.entries:
            return False
        room, thread = self._room, current_thread()
        try:
            with room.lock:
                if room.is_passing() or not self.passes((source.key, device), source) or not self._has_slots():
                    return False
                room.passing = thread
            steps = _steps_of(source)
            return steps is not None and self._use_all(_Step(source, version_of(source), steps), use)
        finally:
            if room.passing is thread:
                with room.lock:
                    room.passing = None
                    room.wake()

    def _has_slots(self) -> bool:
        if not self._slots:
            if not self._loading.try_room(STREAM_NBYTES):
                return False
            # On another thread, where no mode of the present one makes them tensors that cannot be used anywhere; not
            # on that of the stream, which may be in the middle of a read, or wait for the lock that is held here.
            try:
                with ThreadPoolExecutor(1) as maker:
                    slots = maker.submit(_new_slots).result()
            except RuntimeError:  # the interpreter ends, or there is no memory for them
                return False
            self._room.reserve(STREAM_NBYTES)
            self._slots = slots
            with self._lock:
                self._free = list(self._slots)
        return True

    def _use_all(self, first: _Step, use: Use) -> bool:
        if not self._is_whole:  # what tidied up after an interrupt was interrupted
            self._turn_to(None)
        self._is_whole = False
        try:
            for at in range(first.steps.count):
                read = self._take(replace(first, at=at))
                if read.rows is None:
                    return False
                use(read.rows)
                with self._lock:
                    self._free.append(read.slot)
                    self._go_on()
            self._is_whole = True
        finally:
            if not self._is_whole:
                self._turn_to(None)
        return True

    def _take(self, step: _Step) -> _Read:
        """Wait for a step, reading what comes after it meanwhile; what else was read is given up."""
        while True:
            with self._lock:
                coming = self._coming()
                if coming is None or not coming.is_at(step):
                    self._restart(step)
                read = self._reads.get(self._taken)
                if read is not None and read.done:
                    del self._reads[self._taken]
                    self._taken += 1
                    return read
                mine = self._begin(mine=True)
                # Without a free slot, one is coming from what was given up.
                other = read or next(iter(self._busy), None)
            if mine is not None:
                self._read(mine)
            elif other is not None and other.reading.acquire(timeout=_LONGEST_WAIT_S):
                other.reading.release()

    def _coming(self) -> _Step | None:
        read = self._reads.get(self._taken)
        return read.step if read is not None else self._plan[0] if self._plan else None

    def _turn_to(self, step: _Step | None) -> None:
        with self._lock:
            self._restart(step)
        self._is_whole = True

    def _restart(self, step: _Step | None) -> None:
        self._turn += 1
        # Who uses the values is here, and not reading: what it had begun was interrupted.
        self._busy = [read for read in self._busy if not read.mine]
        # A slot that is being read into is free when that has ended.
        self._free = [slot for slot in self._slots if not any(slot is read.slot for read in self._busy)]
        self._reads.clear()
        self._taken = self._begun = 0
        self._plan = deque(() if step is None else (step,))
        self._last = step
        self._go_on()

    def give_up(self) -> bool:
        """Give the slots back to the budget, unless a value is passing; say whether there were any. Lock held."""
        if not self._slots or self._room.is_passing():
            return False
        self._slots = []
        self._turn_to(None)
        self._room.reserved -= STREAM_NBYTES
        self._room.wake()
        return True

    def close(self) -> None:
        """End the thread and give up the slots, once what passes has passed. The table is closed: nothing more does."""
        with self._room.lock:
            while self._room.is_passing():
                self._room.sleep()
            self.give_up()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    # ---- reading --------------------------------------------------------------------------------------------------

    def _begin(self, mine: bool = False) -> _Read | None:
        """Let the calling thread read the next step; None when there is none, or no memory for it. `_lock` held."""
        if not self._plan or not self._free:
            return None
        step = self._plan[0]
        if step.at + 1 < step.steps.count:
            self._plan[0] = replace(step, at=step.at + 1)
        else:
            self._plan.popleft()
        read = self._reads[self._begun] = _Read(step, self._free.pop(), self._turn, mine)
        read.reading.acquire()
        self._begun += 1
        self._busy.append(read)
        return read

    def _read(self, read: _Read) -> None:
        start = monotonic()
        try:
            with suppress(Exception):  # who uses the value loads it then, and meets the error
                read.rows = read.step.steps.read(read.step.at, read.slot)
                self._loading.pace.note(read.rows.nbytes, monotonic() - start)
        finally:
            with self._lock:
                self._end(read)

    def _end(self, read: _Read) -> None:
        read.done = True
        self._busy.remove(read)
        if read.turn != self._turn:
            if any(read.slot is slot for slot in self._slots):
                self._free.append(read.slot)
        elif read.rows is None:
            self._plan.clear()
        read.reading.release()
        self._changed.notify_all()

    def _go_on(self) -> None:
        """Have the thread look again, or start it. `_lock` held."""
        if self._has_thread:
            self._changed.notify_all()
        elif self._plan:
            with suppress(RuntimeError):  # the interpreter ends, or has no more threads: who uses the values reads all
                self._executor().submit(self._read_on)
                self._has_thread = True

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="t2n_hf-stream")
        return self._threads

    def _read_on(self) -> None:
        while (read := self._wait_to_begin()) is not None:
            self._read(read)

    def _wait_to_begin(self) -> _Read | None:
        """Wait a moment for something to read and memory for it; None when there is none, and the thread may end."""
        while True:
            with self._lock:
                read, turn, last = self._begin(), self._turn, self._last if len(self._plan) < _PLANNED else None
            found = last is not None and self._extend(last, turn)
            if read is not None:
                return read
            with self._lock:
                if not (found or (self._plan and self._free)) and not self._changed.wait(_IDLE_S):
                    self._has_thread = False
                    return None

    def _extend(self, last: _Step, turn: int) -> bool:
        """Plan the value that passes after `last`; say whether there is one."""
        with self._room.lock:
            found = self._next_to_pass((last.source.key, _CPU))
        if found is None:
            return False
        with self._lock:
            if turn == self._turn:
                self._plan.append(found)
                self._last = found
        return True

    def _next_to_pass(self, key: Key) -> _Step | None:
        for other in self._table.policy.following(key):
            source = self._table.source_at(other)  # type: ignore[arg-type]
            if source is not None and self.passes(other, source):  # type: ignore[arg-type]
                steps = _steps_of(source)
                return None if steps is None else _Step(source, version_of(source), steps)
        return None


def _new_slots() -> list[torch.Tensor]:
    """Slots next to each other, in large pages where the system has them: there are fewer to look up."""
    memory = mmap.mmap(-1, _SLOT_COUNT * _SLOT_NBYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return list(torch.frombuffer(memory, dtype=torch.uint8).split(_SLOT_NBYTES))


def _steps_of(source: Source) -> Steps | None:
    steps: Callable[[int], Steps | None] | None = getattr(source, "steps", None)
    return None if steps is None else steps(_SLOT_NBYTES)
