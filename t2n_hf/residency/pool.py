"""Bounded memory for values that are kept elsewhere."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, final

import torch

from t2n_hf.errors import ConfigError, ResidencyError
from t2n_hf.residency.entry import Entry, LoadState
from t2n_hf.residency.lease import TensorResidencyLease
from t2n_hf.residency.policy import ResidencyStrategy, policy_of
from t2n_hf.residency.prefetch import TensorPrefetch
from t2n_hf.residency.scope import ActiveScope, entered
from t2n_hf.residency.source import Device, Source, device_of, source_of, version_of
from t2n_hf.residency.table import ResidentTable

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

    Every method may be called from any thread. Values are loaded outside the lock; threads that ask for a value that is
    being loaded wait for it; a load that fails is forgotten, so that the next access reads again. Where a source is
    expected, an object with one in its attribute `source` (an OffloadedTensor) will do. A deep copy is an empty pool of
    the same settings.
    """

    def __init__(
        self,
        max_cached_bytes: int | None = None,
        max_workers: int = 1,
        strategy: ResidencyStrategy = ResidencyStrategy.LRU,
    ) -> None:
        if max_cached_bytes is not None and max_cached_bytes < 0:
            raise ConfigError(f"max_cached_bytes must be >= 0 or None, got {max_cached_bytes}")
        if max_workers < 1:
            raise ConfigError(f"max_workers must be >= 1, got {max_workers}")
        self.max_cached_bytes = max_cached_bytes
        self.max_workers = max_workers
        self.strategy = ResidencyStrategy(strategy)
        self._table = ResidentTable(max_cached_bytes, policy_of(self.strategy, max_cached_bytes))
        self._leases = 0
        self._closed = False
        self._workers: tuple[int, ThreadPoolExecutor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorResidencyPool":
        """Make an empty pool of the same settings: locks and threads cannot be copied, values need not be."""
        return TensorResidencyPool(self.max_cached_bytes, self.max_workers, self.strategy)

    def __repr__(self) -> str:
        """Show settings and use."""
        budget = "unlimited" if self.max_cached_bytes is None else f"{self.max_cached_bytes} bytes"
        use = "closed" if self._closed else f"{self._table.nbytes} bytes resident, {self._leases} leases"
        return f"TensorResidencyPool({self.strategy.name}, {budget}; {use})"

    @property
    def resident_bytes(self) -> int:
        """Return the approximate bytes held by resident values, leased ones included."""
        return self._table.nbytes

    @property
    def lease_count(self) -> int:
        """Number of open leases."""
        return self._leases

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def acquire(self, source: Any, device: Device | None = None, mode: str = "read") -> TensorResidencyLease:  # noqa: ANN401
        """Return a scoped lease for source; opening it loads the value.

        Use mode="read_write" when the returned value may be modified. The pool writes dirty values back before eviction
        or flushing. Raises ConfigError for another mode, ResidencyError when the source cannot be written.
        """
        return TensorResidencyLease(self, source_of(source), device_of(source, device), mode)

    def resolve(self, source: Any, device: Device | None = None) -> torch.Tensor:  # noqa: ANN401
        """Return a resident value, loading it when necessary.

        This is the read-only path used automatically by OffloadedTensor inside :meth:`scope`. Use :meth:`acquire` for
        active-use protection or mutation tracking. Under LRU, use :meth:`pin` for manual retention.
        """
        self._refuse_closed()
        entry = self._table.hold(source_of(source), device_of(source, device))
        value = entry.value
        self._table.let_go(entry)
        return value  # type: ignore[return-value]

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
        with self._table.changed:
            self._table.pins = {key for key in self._table.pins if key[0] != wanted}  # type: ignore[index]
        self._table.shrink()

    def is_pinned(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source is manually pinned."""
        wanted = source_of(source).key
        with self._table.changed:
            return any(key[0] == wanted for key in self._table.pins)  # type: ignore[index]

    def is_resident(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source has completed loading into the pool, on any device."""
        source = source_of(source)
        with self._table.changed:
            entries = [self._table.current(key, source) for key in self._table.keys_of(source)]
            return any(entry is not None and entry.state is LoadState.READY for entry in entries)

    def evict(self, source: Any) -> None:  # noqa: ANN401
        """Write back and remove an unleased, unpinned value from the pool; do nothing when it is not there.

        Raises ResidencyError for a leased or pinned value, StorageError when it cannot be written back (it then stays).
        """
        source = source_of(source)
        with self._table.changed:
            keys = self._table.keys_of(source)
        for key in keys:
            self._table.settle(key, remove=True)

    def flush(self, source: Any = None) -> None:  # noqa: ANN401
        """Wait for loads and write dirty resident values back to storage (None: of all sources).

        Raises StorageError when one cannot be written; it stays resident and dirty.
        """
        with self._table.changed:
            keys = list(self._table.entries) if source is None else self._table.keys_of(source_of(source))
        for key in keys:
            self._table.settle(key, remove=False)

    def close(self) -> None:
        """Flush all values, stop workers, and release resident memory. Does nothing when closed already.

        Raises ResidencyError while leases are open, and StorageError when a value cannot be written back: the pool then
        stays as it was.
        """
        with self._table.changed:
            if self._closed:
                return
            if self._leases:
                held = ", ".join(sorted(str(e.source.key) for e in self._table.entries.values() if e.leases))
                raise ResidencyError(f"{self._leases} leases are open ({held}); release them, then close the pool")
            self._closed = True
        try:
            self.flush()
        except BaseException:
            self._closed = False
            raise
        workers, self._workers = self._workers, None
        if workers is not None and workers[0] == os.getpid():
            workers[1].shutdown()
        with self._table.changed:
            self._table.pins.clear()
            for entry in list(self._table.entries.values()):
                self._table.drop(entry)

    def __enter__(self) -> "TensorResidencyPool":
        """Return the pool; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool."""
        self.close()

    @contextmanager
    def scope(self, device: Device | None = None) -> Iterator["TensorResidencyPool"]:
        """Make this pool transparently serve offloaded tensor reloads of this context, on `device` if given.

        Scopes nest. A thread that is started inside does not inherit the scope: bind the pool to the tensors instead.
        """
        with entered(ActiveScope(self, None if device is None else torch.device(device))):
            yield self

    def claim(self, source: Source, device: torch.device, write: bool) -> Entry:
        """Load the value if need be and lease it: what `TensorResidencyLease` does when it is opened."""
        self._refuse_closed()
        entry = self._table.hold(source, device)
        with self._table.changed:
            entry.waiting -= 1
            entry.leases += 1
            self._leases += 1
            if write:
                entry.writers += 1
                entry.dirty = True
        return entry

    def unclaim(self, entry: Entry, write: bool) -> None:
        """End a claim. Raises ResidencyError when the tensor was overwritten meanwhile, so that changes are lost."""
        with self._table.changed:
            entry.leases -= 1
            entry.writers -= write
            self._leases -= 1
            entry.waiting += 1
            overtaken = write and entry.detached
            if write:
                entry.dirty = True  # a flush may have stored the value before its last change
        self._table.let_go(entry)
        if overtaken:
            raise ResidencyError(
                f"{entry.source.key} was overwritten while a read_write lease was open: what was changed through the "
                "lease is lost; do one or the other"
            )

    def _begin(self, source: Source, device: torch.device, pin: bool) -> TensorPrefetch:
        key = (source.key, device)
        with self._table.changed:
            self._refuse_closed()
            self._table.policy.expect(key)
            if pin:
                self._table.pins.add(key)
            entry = self._table.current(key, source)
            handed = None if pin or entry is not None else self._table.handed(key, version_of(source))
            if handed is not None:
                return TensorPrefetch(self, source, device, handed)
            if entry is None:
                entry = self._table.enter(key, source, device)
                if entry.state is LoadState.QUEUED:
                    self._executor().submit(self._table.load_queued, entry)
            value = entry.value if entry.state is LoadState.READY else None
            return TensorPrefetch(self, source, device, entry.loaded if value is None else None, value)

    def _executor(self) -> ThreadPoolExecutor:
        # After a fork the child has the object but none of its threads.
        if self._workers is None or self._workers[0] != os.getpid():
            self._workers = (os.getpid(), ThreadPoolExecutor(self.max_workers, thread_name_prefix="t2n_hf-pool"))
        return self._workers[1]

    def _refuse_fixed(self, action: str) -> None:
        if self.strategy is ResidencyStrategy.FIXED:
            raise ResidencyError(f"cannot {action} under ResidencyStrategy.FIXED; use LRU or LEARNED for manual pins")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ResidencyError("the residency pool is closed; make another one")
