"""What a pool remembers of one value, and of those who use it."""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Thread
from typing import TypeAlias, final

import torch

from t2n_hf.errors import ResidencyError
from t2n_hf.residency.source import Source, version_of

__all__ = ["Claim", "Entry", "Key", "LoadState", "Wanted", "Withdrawn"]

Key: TypeAlias = tuple[Hashable, torch.device]
Wanted: TypeAlias = Sequence[tuple[Source, torch.device]]


class Withdrawn(ResidencyError):
    """A load was taken back before anybody began it; who waits for it starts another one."""


class LoadState(Enum):
    """QUEUED: a worker will load it, or who needs it first. LOADING: one thread reads it. FAILED: forgotten."""

    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """One value on one device. Every field is read and written with the pool's lock held, except by who loads it.

    `version` is that of the source when loading began. `leases` counts open leases, `writers` those that may write;
    `reserved` are bytes put aside for it while it is loaded, `stamp` is torch's count of writes to the value. `keep`
    holds the source of a value that is to be written back: that of others lives as long as its tensor. `ahead`: nobody
    has used it since it was read ahead. `queued`: a worker will look at it. `loader` is the thread that loads it,
    `reading`: it reads, or is about to and waits for nothing. `detached` entries left the pool's table while in use.
    """

    key: Key
    nbytes: int
    version: int
    state: LoadState
    value: torch.Tensor | None = None
    keep: Source | None = None
    leases: int = 0
    writers: int = 0
    reserved: int = 0
    stamp: int = 0
    dirty: bool = False
    writing: bool = False
    detached: bool = False
    ahead: bool = False
    queued: bool = False
    reading: bool = False
    loader: Thread | None = None
    loaded: "Future[torch.Tensor]" = field(default_factory=Future)

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.key[0])

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses the value or writes it back."""
        return self.state is LoadState.READY and not (self.leases or self.writing)

    @property
    def is_overtaken(self) -> bool:
        """Whether what is to be written back was overwritten in the source since it was loaded."""
        return self.keep is not None and not self.writing and self.version != version_of(self.keep)


@final
class Claim:
    """Entries that one thread has leased together. `nested` bytes are put aside for what it leases meanwhile.

    Unless it is `whole`, what can be used in pieces need not be among them, see `Stream`.

    `entries` is empty when it is not open. `owner` is the thread that opened it, `taken` what it took of the bytes that
    an outer claim of that thread had put aside.
    """

    __slots__ = ("entries", "nested", "owner", "taken", "whole", "writes")

    def __init__(self, writes: bool = False, nested: int = 0, *, whole: bool = False) -> None:
        self.entries: list[Entry] = []
        self.writes = writes
        self.nested = nested
        self.whole = whole
        self.owner: Thread | None = None
        self.taken = 0
