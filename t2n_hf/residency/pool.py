"""Bounded memory for values that are kept elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, final

import torch

from t2n_hf.errors import ConfigError, ResidencyError, T2NError
from t2n_hf.residency.ahead import Readahead
from t2n_hf.residency.claims import Claims
from t2n_hf.residency.entry import Claim, LoadState, Wanted
from t2n_hf.residency.forking import tell_of_forks
from t2n_hf.residency.learned import LearnedOrder
from t2n_hf.residency.lease import TensorResidencyLease
from t2n_hf.residency.loading import Loading
from t2n_hf.residency.policy import FirstFit, LeastRecent, Policy, ResidencyStrategy
from t2n_hf.residency.prefetch import TensorPrefetch
from t2n_hf.residency.room import Room
from t2n_hf.residency.scope import ActiveScope, entered
from t2n_hf.residency.source import Device, Source, device_of, source_of, version_of
from t2n_hf.residency.stream import Stream
from t2n_hf.residency.table import ResidentTable
from t2n_hf.residency.workers import Workers

__all__ = ["TensorResidencyPool"]


@final
class TensorResidencyPool:
    """Keep offloaded tensors resident across a bounded operation scope.

    Values can be prefetched by background workers and acquired through a lease. A lease is a scoped claim that a
    materialized value is in active use, so its value remains resident until the lease ends. The default LRU strategy
    evicts other values in least-recently-used order when the optional cache budget is exceeded and supports manual
    pins. The FIXED strategy retains the first completed values that fit and streams later values without displacing
    that resident set. LEARNED evicts the value whose next use is furthest. A read_write lease writes the value back
    before eviction.

    `max_cached_bytes` is a soft cache-retention limit, not a hard bound on process memory: room is made before a value
    is loaded, but leased and pinned values stay even when they exceed it, and what callers hold is theirs. An oversized
    value is evicted as soon as its final lease ends. Prefetched values that cannot be retained are handed to who waits
    for them, see `TensorPrefetch`.

    With `strict` the limit is hard for what the pool holds and loads: opening a lease waits until the leases of other
    threads leave room. Nobody waits for ever: a thread that holds leases already, or is the only one that does, goes
    on, and so does one that saw nothing happen for 10 s; a value that is larger than the limit is loaded when nobody
    else holds any. What is pinned takes room as leases do, but pinning what is resident waits for nobody. FIXED cannot
    be strict.

    With `readahead_nbytes` every lease that is opened has the workers load what the learned order says comes next, at
    most so many bytes that nobody has used yet, within the limit, and never at the expense of what is needed sooner. It
    needs LEARNED, and begins with the second pass.

    Every method may be called from any thread. Values are loaded outside the lock; threads that ask for a value that is
    being loaded wait for it; a load that fails is forgotten, so that the next access reads again. Where a source is
    expected, an object with one in its attribute `source` (an OffloadedTensor) will do; its value leaves the pool when
    nothing else has it any more. A deep copy is an empty pool of the same settings. A forked child has the values, and
    the leases of the thread that forked.
    """

    def __init__(
        self,
        max_cached_bytes: int | None = None,
        max_workers: int = 1,
        strategy: ResidencyStrategy = ResidencyStrategy.LRU,
        *,
        strict: bool = False,
        readahead_nbytes: int = 0,
    ) -> None:
        if max_cached_bytes is not None and max_cached_bytes < 0:
            raise ConfigError(f"max_cached_bytes must be >= 0 or None, got {max_cached_bytes}")
        if max_workers < 1:
            raise ConfigError(f"max_workers must be >= 1, got {max_workers}")
        if readahead_nbytes < 0:
            raise ConfigError(f"readahead_nbytes must be >= 0, got {readahead_nbytes}")
        self.max_cached_bytes = max_cached_bytes
        self.max_workers = max_workers
        try:
            self.strategy = ResidencyStrategy(strategy)
        except ValueError as error:
            known = ", ".join(repr(known.value) for known in ResidencyStrategy)
            raise ConfigError(f"strategy={strategy!r}; expected a ResidencyStrategy, or one of {known}") from error
        self.strict = strict
        self.readahead_nbytes = readahead_nbytes
        if strict and self.strategy is ResidencyStrategy.FIXED:
            raise ConfigError("strict=True needs LRU or LEARNED: FIXED leaves no room to wait for")
        self._room = Room(max_cached_bytes, strict)
        self._table = ResidentTable(self._room, _policy_of(self.strategy, max_cached_bytes))
        self._loading = Loading(self._table)
        self._claims = Claims(self._table, self._loading)
        self._workers = Workers(max_workers, self._loading.load_queued)
        self._ahead: Readahead | None = None
        self._stream: Stream | None = None
        if readahead_nbytes and self.strategy is ResidencyStrategy.LEARNED:
            self._stream = Stream(self._table, self._loading)
            self._ahead = Readahead(self._table, self._loading, self._workers, readahead_nbytes, self._stream)
            self._loading.cancel = self._cancel
        tell_of_forks(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorResidencyPool":
        """Make an empty pool of the same settings: locks and threads cannot be copied, values need not be."""
        return TensorResidencyPool(
            self.max_cached_bytes,
            self.max_workers,
            self.strategy,
            strict=self.strict,
            readahead_nbytes=self.readahead_nbytes,
        )

    def __repr__(self) -> str:
        """Show settings and use."""
        budget = "unlimited" if self.max_cached_bytes is None else f"{self.max_cached_bytes} bytes"
        use = "closed" if self.closed else f"{self.resident_bytes} bytes resident, {self.lease_count} leases"
        return f"TensorResidencyPool({self.strategy.name}, {budget}{', strict' * self.strict}; {use})"

    @property
    def resident_bytes(self) -> int:
        """Return the approximate bytes held by resident values, leased ones included.

        Cheap, and may be read at any time from any thread: a plot of memory over time samples it.
        """
        return self._room.loaded

    @property
    def used_bytes(self) -> int:
        """Bytes held by resident values and put aside for those that are being loaded: what the limit is about."""
        with self._room.lock:
            return self._room.loaded + self._room.reserved

    @property
    def peak_bytes(self) -> int:
        """The most that `used_bytes` has been."""
        return self._room.most

    @property
    def lease_count(self) -> int:
        """Number of open leases."""
        return self._claims.count

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._table.closed

    def acquire(self, source: Any, device: Device | None = None, mode: str = "read") -> TensorResidencyLease:  # noqa: ANN401
        """Return a scoped lease for source; opening it loads the value.

        Use mode="read_write" when the returned value may be modified. The pool writes dirty values back before eviction
        or flushing. Raises ConfigError for another mode, ResidencyError when the source cannot be written.
        """
        return TensorResidencyLease(self, source, device, mode)

    def resolve(self, source: Any, device: Device | None = None) -> torch.Tensor:  # noqa: ANN401
        """Return a resident value, loading it when necessary.

        This is the read-only path used automatically by OffloadedTensor inside :meth:`scope`. Use :meth:`acquire` for
        active-use protection or mutation tracking. Under LRU, use :meth:`pin` for manual retention.
        """
        return self._claims.resolve(source_of(source), device_of(source, device))

    def prefetch(self, source: Any, device: Device | None = None) -> TensorPrefetch:  # noqa: ANN401
        """Begin loading source and return a completion handle."""
        return self._begin(source_of(source), device_of(source, device), pin=False)

    def pin(self, source: Any, device: Device | None = None) -> TensorPrefetch:  # noqa: ANN401
        """Load source and exclude it from eviction until unpinned.

        Pinning is idempotent and the returned handle can be used to wait for materialization. A pin is cache policy
        rather than an active-use lease, so closing the pool releases pinned values automatically; a failed load unpins.
        Raises ResidencyError under FIXED, whose resident set is not to be changed by hand.
        """
        self._refuse_fixed("pin")
        return self._begin(source_of(source), device_of(source, device), pin=True)

    def unpin(self, source: Any) -> None:  # noqa: ANN401
        """Return a manually pinned value to normal management. Raises ResidencyError under FIXED."""
        self._refuse_fixed("unpin")
        wanted = source_of(source).key
        with self._room.lock:
            self._table.pins = {key for key in self._table.pins if key[0] != wanted}
            self._room.wake()
        self._table.shrink()

    def is_pinned(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source is manually pinned."""
        wanted = source_of(source).key
        with self._room.lock:
            return any(key[0] == wanted for key in self._table.pins)

    def is_resident(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source has completed loading into the pool, on any device."""
        source = source_of(source)
        with self._room.lock:
            entries = [self._table.current(key, source) for key in self._table.keys_of(source)]
            return any(entry is not None and entry.state is LoadState.READY for entry in entries)

    def evict(self, source: Any) -> None:  # noqa: ANN401
        """Write back and remove an unleased, unpinned value from the pool; do nothing when it is not there.

        Raises ResidencyError for a leased or pinned value, StorageError when it cannot be written back (it then stays).
        """
        source = source_of(source)
        with self._room.lock:
            keys = self._table.keys_of(source)
        for key in keys:
            self._table.settle(key, remove=True)

    def flush(self, source: Any = None) -> None:  # noqa: ANN401
        """Wait for loads and write dirty resident values back to storage (None: of all sources).

        Raises StorageError when one cannot be written; it stays resident and dirty.
        """
        with self._room.lock:
            keys = list(self._table.entries) if source is None else self._table.keys_of(source_of(source))
        for key in keys:
            self._table.settle(key, remove=False)

    def close(self) -> None:
        """Flush all values, stop workers, and release resident memory. Does nothing when closed already.

        Raises ResidencyError while leases are open, and StorageError when a value cannot be written back: the pool then
        stays as it was.
        """
        with self._room.lock:
            if self.closed:
                return
            if self.lease_count:
                held = ", ".join(sorted(e.name for e in self._table.entries.values() if e.leases))
                raise ResidencyError(f"{self.lease_count} leases are open ({held}); release them, then close the pool")
            self._table.closed = True
        try:
            self.flush()
        except BaseException:
            self._table.closed = False
            raise
        try:
            self._workers.close()
            if self._stream is not None:
                self._stream.close()
        finally:  # also when an interrupt ends the wait for the threads
            with self._room.lock:
                self._table.pins.clear()
                for entry in list(self._table.entries.values()):
                    if entry.state is LoadState.QUEUED:  # there could be no worker: who has its handle is told
                        self._table.withdraw(entry)
                    else:
                        self._table.drop(entry)

    def __enter__(self) -> "TensorResidencyPool":
        """Return the pool; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool. What ended the block matters more than that the pool could not be closed because of it."""
        try:
            self.close()
        except T2NError:
            if error is None:
                raise

    @contextmanager
    def scope(self, device: Device | None = None) -> Iterator["TensorResidencyPool"]:
        """Make this pool transparently serve offloaded tensor reloads of this context, on `device` if given.

        Scopes nest. A thread that is started inside does not inherit the scope: bind the pool to the tensors instead.
        Raises ResidencyError when the pool is closed.
        """
        with self._room.lock:
            self._table.refuse_closed()
        with entered(ActiveScope(self, None if device is None else torch.device(device))):
            yield self

    # ---- what leases, handles and hooks call ----------------------------------------------------------------------

    def open(self, claim: Claim, wanted: Wanted) -> None:
        """Lease all of `wanted`, which are (source, device) pairs, and load what is missing: together or not at all.

        Raises StorageError when one cannot be read.
        """
        try:
            with self._room.lock:
                if self._stream is not None:
                    wanted = self._stream.left(claim, wanted)
                missing = self._claims.lease(claim, wanted)
                if missing:
                    self._claims.reserve_missing(claim)
                if self._ahead is not None:
                    self._ahead.plan()
            if missing:
                self._claims.load_missing(claim, wanted)
        except BaseException:
            self._claims.release(claim)
            raise

    def release(self, claim: Claim) -> None:
        """End a claim, from any thread; does nothing when it is not open.

        Raises ResidencyError when what was leased for writing was overwritten meanwhile, so that changes are lost.
        """
        self._claims.release(claim)

    def call_before_wait(self, action: Callable[[], None] | None) -> None:
        """Have `action` called whenever a lease waits for those of other threads: it may release what is left over."""
        self._room.before_wait = action

    def stream(self, source: Source, device: torch.device, use: Callable[[torch.Tensor], None]) -> bool:
        """Call `use` with the rows of a value that is not kept, see `Stream.use`; False when it has to be resolved."""
        return self._stream is not None and self._stream.use(source, device, use)

    def _cancel(self) -> bool:
        """Give room back that nobody needs yet. Lock held."""
        return (self._ahead is not None and self._ahead.cancel()) or (
            self._stream is not None and self._stream.give_up()
        )

    def hasten(self, source: Source, device: torch.device) -> None:
        """Load a queued value in the calling thread, which waits for it, unless a worker has begun to."""
        self._claims.hasten(source, device)

    def _begin(self, source: Source, device: torch.device, pin: bool) -> TensorPrefetch:
        table, key = self._table, (source.key, device)
        with self._room.lock:
            table.await_written(key, source)
            table.policy.expect(key)
            if pin:
                table.pins.add(key)
            entry = table.current(key, source)
            handed = None if pin or entry is not None else table.handed(key, version_of(source))
            if handed is not None:
                return TensorPrefetch(self, source, device, handed)
            if entry is None:
                entry = table.enter(key, source)
            if entry.ahead and entry.state is LoadState.QUEUED:
                # Its room could be taken back as long as nobody had asked for it; now its worker waits like others.
                table.end_load(entry)
                self._room.wake()
            entry.ahead = False
            if entry.state is LoadState.QUEUED and not entry.queued:
                self._workers.put(entry, source)
            value = entry.value if entry.state is LoadState.READY else None
            return TensorPrefetch(self, source, device, entry.loaded if value is None else None, value)

    def _refuse_fixed(self, action: str) -> None:
        if self.strategy is ResidencyStrategy.FIXED:
            raise ResidencyError(f"cannot {action} under ResidencyStrategy.FIXED; use LRU or LEARNED for manual pins")

    # ---- forks ----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Let no other thread be in the middle of a change."""
        self._room.lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._room.lock.release()

    def after_fork_in_child(self) -> None:
        """Forget the loads that only threads of the parent go on with."""
        self._room.renew()
        self._workers.renew()
        if self._stream is not None:
            self._stream.renew()
        with self._room.lock:
            for entry in list(self._table.entries.values()):
                if entry.writing:  # what is under way is stored in the parent alone
                    entry.writing, entry.dirty = False, True
                if entry.state is not LoadState.READY:
                    entry.reading = False  # `renew` forgot who reads
                    self._table.withdraw(entry)
            self._claims.end_others()
            # Loads of entries that left the table are forgotten with their threads.
            self._room.reserved = 0 if self._stream is None else self._stream.reserved_nbytes


def _policy_of(strategy: ResidencyStrategy, max_bytes: int | None) -> Policy:
    if strategy is ResidencyStrategy.FIXED:
        return FirstFit(max_bytes)
    return LeastRecent() if strategy is ResidencyStrategy.LRU else LearnedOrder()
