"""What leases, handles, scopes and tensors need of a pool, so that they need not know the pool itself."""

from typing import Any, Protocol

import torch

from t2n_hf.residency.entry import Entry
from t2n_hf.residency.source import Device, Source

__all__ = ["ServingPool"]


class ServingPool(Protocol):
    """A pool as those see it that it serves. `TensorResidencyPool` is one, and says what each method does."""

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""

    def claim(self, source: Source, device: torch.device, write: bool) -> Entry:
        """Load the value if need be and lease it."""

    def unclaim(self, entry: Entry, write: bool) -> None:
        """End a claim."""

    def resolve(self, source: Any, device: Device | None = None) -> torch.Tensor:  # noqa: ANN401
        """Return a resident value, loading it when necessary."""

    def is_resident(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source has completed loading into the pool."""

    def flush(self, source: Any = None) -> None:  # noqa: ANN401
        """Write dirty resident values back to storage."""
