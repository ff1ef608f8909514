"""The handle of a load that runs in the background."""

from concurrent.futures import Future
from contextlib import suppress
from typing import Any, final

import torch

from t2n_hf.residency.entry import Withdrawn
from t2n_hf.residency.serving import ServingPool
from t2n_hf.residency.source import Device, Source, device_of, source_of, version_of

__all__ = ["TensorPrefetch"]


@final
class TensorPrefetch:
    """Handle for an asynchronous tensor prefetch.

    A value that the pool could not retain (oversized, or the budget is full of leased values) lives as long as its
    handle: `wait()` gives it, and `acquire` or `resolve` of the same source take it from there without a second read.
    """

    def __init__(
        self,
        pool: ServingPool,
        source: Any,  # noqa: ANN401 - a Source, or anything with one
        device: Device | None,
        future: "Future[torch.Tensor] | None",
        value: torch.Tensor | None = None,
    ) -> None:
        self.pool = pool
        self.source: Source = source_of(source)
        self.device = device_of(source, device)
        self._future = future
        self._value = value
        self._version = version_of(self.source)

    def done(self) -> bool:
        """Return whether the prefetch has finished (a failed one has)."""
        return self._future is None or self._future.done()

    def wait(self) -> torch.Tensor:
        """Wait for prefetch completion and return the resident value.

        Raises what loading raised (StorageError); the pool has forgotten the failure, so a later access reads again.
        """
        value = None
        if version_of(self.source) == self._version:
            if not self.done():
                self.pool.hasten(self.source, self.device)
            with suppress(Withdrawn):
                value = self._value if self._future is None else self._future.result()
        if value is None or version_of(self.source) != self._version:  # written since
            return self.pool.resolve(self.source, self.device)
        return value
