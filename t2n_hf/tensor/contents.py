"""Values at rest: byte ranges of the user's files, a range of a spill, or a tensor in memory. They never change."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, final

import torch

from t2n_hf.contract import SupportsOffloadState
from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import FormatError
from t2n_hf.store.checkpoint import ByteRange, read_ranges
from t2n_hf.store.memory import aligned_buffer, runs_of
from t2n_hf.store.spill import SpillRange
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["Content", "MemoryContent", "RangeContent", "SpillContent", "rebuilt_rows", "row_parts_of"]


class Content(Protocol):
    """Values at rest. `kind` is the class of a packed value, None for a plain tensor; `nbytes` its size at rest."""

    @property
    def kind(self) -> type[OpaqueTensor] | None:
        """Class of the value that `read` gives, None for a plain tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value that `read` gives."""

    def read(self, device: torch.device) -> torch.Tensor:
        """Give the value; a packed one on `device`, a plain one on the CPU or `device`. Raises StorageError."""

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Give the rows (of the first axis) at ascending indices of the value, which has `shape`.

        Nothing else is read; a packed value gives packed rows. None when that cannot be. Raises StorageError.
        """

    def advise(self) -> None:
        """Tell the system that all of it is read soon. Does nothing where that cannot be told."""


@final
class RangeContent:
    """One or more ranges of safetensors files whose bytes, one after the other, are those of a tensor of `shape`.

    Raises FormatError when they are not as many as the shape needs.
    """

    kind = None

    def __init__(self, ranges: Sequence[ByteRange], shape: Sequence[int]) -> None:
        self.ranges = tuple(ranges)
        self.shape = torch.Size(shape)
        self.dtype: torch.dtype = getattr(torch, dtype_named(self.ranges[0].dtype).torch)
        self.nbytes = sum(part.nbytes for part in self.ranges)
        wanted = self.shape.numel() * self.dtype.itemsize
        if self.nbytes != wanted or len({part.dtype for part in self.ranges}) != 1:
            kinds = ", ".join(sorted({part.dtype for part in self.ranges}))
            raise FormatError(
                f"{self.ranges[0].name!r} and {len(self.ranges) - 1} more ranges hold {self.nbytes} bytes of {kinds}; "
                f"a tensor of shape {tuple(self.shape)} and {self.dtype} takes {wanted}"
            )

    def read(self, device: torch.device) -> torch.Tensor:
        """Read all of it."""
        if len(self.ranges) == 1:
            return self.ranges[0].read().view(self.shape)
        return self._joined(self.ranges, self.nbytes).view(self.shape)

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Read runs of neighbouring rows at once."""
        count = self.shape[0] if self.shape else 0
        if not count or (len(self.ranges) != 1 and len(self.ranges) % count):
            return None
        wide = len(self.ranges) // count
        parts: list[ByteRange] = []
        for start, stop in runs_of(rows):
            if len(self.ranges) == 1:
                parts.append(self.ranges[0].rows(start, stop))
            else:
                parts.extend(self.ranges[start * wide : stop * wide])
        nbytes = self.nbytes // count * len(rows)
        return self._joined(parts, nbytes).view(len(rows), *self.shape[1:])

    def _joined(self, parts: Sequence[ByteRange], nbytes: int) -> torch.Tensor:
        buffer = aligned_buffer(nbytes)
        read_ranges(parts, buffer)
        return buffer.view(self.dtype)

    def advise(self) -> None:
        """Let the system read ahead in the user's files."""
        for part in self.ranges:
            part.advise()


@final
class SpillContent:
    """A tensor or a packed state in a spill."""

    def __init__(self, stored: SpillRange, kind: type[OpaqueTensor] | None) -> None:
        self._stored = stored
        self.kind = kind
        self.nbytes = stored.nbytes

    def read(self, device: torch.device) -> torch.Tensor:
        """Read all of it; a packed class rebuilds itself from its state."""
        found = self._stored.read()
        return found if self.kind is None else self.kind.from_offload_state(found, device)  # type: ignore[attr-defined]

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Read the rows of a plain tensor; of a packed one the parts that its class says have rows."""
        if self.kind is None:
            return cast(torch.Tensor, self._stored.read_rows(rows, ("",)))
        names = row_parts_of(self.kind, self._stored.meta or {}, shape)
        return rebuilt_rows(self.kind, self._stored.read_rows(rows, names), len(rows), shape) if names else None

    def advise(self) -> None:
        """Let the system read ahead in the spill."""
        self._stored.advise()


@final
class MemoryContent:
    """A tensor that stays where it is and is shown in another dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.kind = type(tensor) if isinstance(tensor, OpaqueTensor) else None
        self.nbytes = tensor.opaque_nbytes if isinstance(tensor, OpaqueTensor) else tensor.nbytes

    def read(self, device: torch.device) -> torch.Tensor:
        """Give the tensor itself: the source copies it."""
        return self._tensor

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Copy the rows of a plain tensor."""
        return self._tensor[torch.as_tensor(rows, device=self._tensor.device)] if self.kind is None else None

    def advise(self) -> None:
        """Do nothing: the values are in memory."""


def row_parts_of(kind: Any, meta: Mapping[str, Any], shape: torch.Size) -> frozenset[str]:  # noqa: ANN401 - a class
    """Say which parts of a state of class `kind` can be read by rows, see `SupportsOffloadState.row_parts`."""
    return kind.row_parts(meta, shape) if shape and issubclass(kind, SupportsOffloadState) else frozenset()


def rebuilt_rows(kind: Any, state: Any, count: int, shape: torch.Size) -> torch.Tensor:  # noqa: ANN401 - class, state
    """Rebuild the `count` rows that `state` was cut to. Raises FormatError when the class makes another shape of it."""
    rows: torch.Tensor = kind.from_offload_state(state, None)
    if rows.shape != (count, *shape[1:]):
        raise FormatError(
            f"{kind.__name__}.row_parts allows {count} rows of a tensor of shape {tuple(shape)} to be rebuilt alone, "
            f"but from_offload_state made shape {tuple(rows.shape)} of them"
        )
    return rows
