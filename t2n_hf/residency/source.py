"""All that a pool knows of a value that is kept elsewhere."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias

import torch

from t2n_hf.errors import ConfigError

__all__ = [
    "Device",
    "ReplacingSource",
    "Source",
    "SteppingSource",
    "Steps",
    "WritableSource",
    "device_of",
    "replace_in",
    "source_of",
    "version_of",
]

Device: TypeAlias = torch.device | str | int

_CPU = torch.device("cpu")


class Source(Protocol):
    """A value that can be loaded. `key` never changes and is its alone; `nbytes` is its size in memory once loaded.

    A source whose stored value can change also has `version: int`, which grows with each change: a pool then sees that
    the value it holds is stale.
    """

    @property
    def key(self) -> Hashable:
        """What tells this source from every other one of the process."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the loaded value takes (packed bytes for a packed value)."""

    def load(self, device: torch.device) -> torch.Tensor:
        """Read the value. Raises StorageError, naming file and tensor. May be called from any thread."""


class Steps(Protocol):
    """How a plain value on the CPU is read a few rows at a time: `count` times, in order."""

    @property
    def count(self) -> int:
        """How many steps there are."""

    def read(self, at: int, slot: torch.Tensor) -> torch.Tensor:
        """Read the rows of step `at` into `slot`, uint8, 1-D, on the CPU, and give them. Raises StorageError."""


class SteppingSource(Source, Protocol):
    """A source whose value can be used without ever being loaded whole."""

    def steps(self, slot_nbytes: int) -> Steps | None:
        """Say how the present value is read into slots of so many bytes; None when that cannot be."""


class WritableSource(Source, Protocol):
    """A source that modified values can be written back to."""

    def store(self, value: torch.Tensor) -> None:
        """Make `value` the stored value. Raises StorageError; the older value then stays."""


class ReplacingSource(WritableSource, Protocol):
    """A source that others may write to while a pool writes a modified value back."""

    def replace(self, value: torch.Tensor, version: int) -> int | None:
        """Store `value` in place of that of `version`: give the new version; None, and store nothing, if it changed."""


def source_of(holder: Any) -> Source:  # noqa: ANN401 - a Source, or anything with one
    """Give the source of a tensor that has one in its attribute `source`, or `holder` itself when it is a source.

    Raises ConfigError for what is neither.
    """
    source: Source = getattr(holder, "source", holder)
    if not hasattr(source, "key"):
        raise ConfigError(
            f"a pool holds values of sources, got a {type(holder).__name__}; give an OffloadedTensor "
            "(OffloadedTensor.from_original_tensor(tensor, name) makes one), or a Source"
        )
    return source


def device_of(holder: Any, device: Device | None) -> torch.device:  # noqa: ANN401
    """Say where to load: `device`, else the `target_device` of the holder, else the CPU."""
    if device is None:
        target: torch.device = getattr(holder, "target_device", _CPU)
        return target
    return device if isinstance(device, torch.device) else torch.device(device)


def replace_in(source: Source, value: torch.Tensor, version: int) -> int | None:
    """Write a value back that was loaded at `version`; give the new version, None when a newer value was stored."""
    replace: Callable[[torch.Tensor, int], int | None] | None = getattr(source, "replace", None)
    if replace is not None:
        return replace(value, version)
    source.store(value)  # type: ignore[attr-defined]
    return version_of(source)


def version_of(source: Source) -> int:
    """Say which of its values a source holds now; 0 for a source that never changes."""
    version: int = getattr(source, "version", 0)
    return version
