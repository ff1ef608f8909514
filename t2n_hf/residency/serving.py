"""What leases, handles, scopes and tensors need of a pool, so that they need not know the pool itself."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from t2n_hf.residency.entry import Claim, Wanted
from t2n_hf.residency.source import Device, Source

__all__ = ["ServingPool"]


class ServingPool(Protocol):
    """A pool as those see it that it serves. `TensorResidencyPool` is one, and says what each method does."""

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""

    def open(self, claim: Claim, wanted: Wanted) -> None:
        """Lease values and load what is missing."""

    def release(self, claim: Claim) -> None:
        """End a claim."""

    def hasten(self, source: Source, device: torch.device) -> None:
        """Load a queued value in the calling thread."""

    def resolve(self, source: Any, device: Device | None = None) -> torch.Tensor:  # noqa: ANN401
        """Return a resident value, loading it when necessary."""

    def stream(self, source: Source, device: torch.device, use: Callable[[torch.Tensor], None]) -> bool:
        """Call `use` with the rows of a value that is not kept; False when it has to be resolved."""

    def is_resident(self, source: Any) -> bool:  # noqa: ANN401
        """Return whether source has completed loading into the pool."""

    def flush(self, source: Any = None) -> None:  # noqa: ANN401
        """Write dirty resident values back to storage."""
