"""What a pool remembers of one value."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from t2n_hf.residency.source import Source

__all__ = ["Entry", "LoadState"]


class LoadState(Enum):
    """QUEUED: a worker will load it, or who needs it first. LOADING: one thread reads it. FAILED: forgotten."""

    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """One value on one device. Every field is read and written with the pool's lock held, except by who loads it.

    `version` is that of the source when loading began. `leases` counts open leases, `writers` those that may write,
    `waiting` the threads that wait for the load or copy the reference. `reserved` are bytes put aside for it while it
    is loaded, `stamp` is torch's count of writes to the value. `detached` entries left the pool's table while in use.
    """

    key: Hashable
    source: Source
    device: torch.device
    nbytes: int
    version: int
    state: LoadState
    value: torch.Tensor | None = None
    leases: int = 0
    writers: int = 0
    waiting: int = 0
    reserved: int = 0
    stamp: int = 0
    dirty: bool = False
    writing: bool = False
    detached: bool = False
    loaded: "Future[torch.Tensor]" = field(default_factory=Future)

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses the value, waits for it or writes it back."""
        return self.state is LoadState.READY and not (self.leases or self.waiting or self.writing)
