"""A scoped claim on a value that a pool holds."""

from types import TracebackType
from typing import Any, final

import torch

from t2n_hf.errors import ConfigError, ResidencyError
from t2n_hf.residency.entry import Claim
from t2n_hf.residency.serving import ServingPool
from t2n_hf.residency.source import Device, Source, device_of, source_of

__all__ = ["MODES", "TensorResidencyLease"]

MODES = ("read", "read_write")


@final
class TensorResidencyLease:
    """Scoped access to a value managed by a tensor residency pool.

    The value is loaded, and claimed, when the lease is opened: `with pool.acquire(source) as value:`, `open()`, or the
    first look at `value`. It then stays resident until `release()` or the end of the `with` block, also when the block
    raises. A lease that was never opened holds nothing; a released one can be opened again. Leases do not exclude each
    other: what one in mode "read_write" modifies, an open "read" lease of the same value sees.
    """

    __slots__ = ("_claim", "device", "mode", "pool", "source")

    def __init__(self, pool: ServingPool, source: Any, device: Device | None, mode: str) -> None:  # noqa: ANN401
        device, source = device_of(source, device), source_of(source)
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}; expected one of {', '.join(MODES)}")
        if mode == "read_write" and not hasattr(source, "store"):
            raise ResidencyError(f"{source.key}: mode='read_write', but its source is read-only (it has no store())")
        if mode == "read_write" and device.type == "meta":
            raise ConfigError(
                f"{source.key}: mode='read_write' on the meta device, where there are no values to modify"
            )
        self.pool = pool
        self.source: Source = source
        self.device = device
        self.mode = mode
        self._claim: Claim | None = None

    @property
    def is_open(self) -> bool:
        """Whether the lease claims its value now."""
        return self._claim is not None

    @property
    def value(self) -> torch.Tensor:
        """The resident value; opens the lease when it is not open."""
        if self._claim is None:
            return self.open()
        entries = self._claim.entries
        value = entries[0].value if entries else None
        if value is None:
            raise ResidencyError(
                f"{self.source.key}: the lease of a thread that this forked process does not have; acquire another one"
            )
        return value

    def open(self) -> torch.Tensor:
        """Load the value if need be, claim and return it. Raises StorageError; ResidencyError when open already."""
        if self._claim is not None:
            raise ResidencyError(f"{self.source.key}: this lease is open already; acquire another one")
        self._claim = claim = Claim(self.mode == "read_write", whole=True)
        try:
            self.pool.open(claim, ((self.source, self.device),))
            return self.value
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the claim. Does nothing on a lease that is not open. What an interrupt left of it, another call ends."""
        claim = self._claim
        if claim is None:
            return
        try:
            self.pool.release(claim)
        finally:
            if claim.owner is None:
                self._claim = None

    def __enter__(self) -> torch.Tensor:
        """Open the lease."""
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease."""
        self.release()
