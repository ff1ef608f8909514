"""A matrix in a file, read a few rows at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from t2n_hf.store.checkpoint import ByteRange

__all__ = ["RowSteps", "row_steps"]

# Products with so many rows, or a multiple, give the numbers of a product with all rows bit for bit, in every dtype;
# with 93 rows, sums in f32 are ordered in another way.
_ROW_MULTIPLE: Final = 64


@final
@dataclass(frozen=True)
class RowSteps:
    """Steps of `rows` rows of the matrix in `byte_range`; the last one may have fewer."""

    byte_range: ByteRange
    rows: int

    @property
    def count(self) -> int:
        """How many steps there are."""
        return -(-self.byte_range.shape[0] // self.rows)

    def read(self, at: int, slot: torch.Tensor) -> torch.Tensor:
        """Read step `at` into `slot`, uint8, 1-D: (rows, K). Raises StorageError, also when the file was changed."""
        start = at * self.rows
        part = self.byte_range.rows(start, min(start + self.rows, self.byte_range.shape[0]))
        return part.read(out=slot[: part.nbytes])


def row_steps(byte_range: ByteRange, shape: Sequence[int], slot_nbytes: int) -> RowSteps | None:
    """Cut a matrix (N, K) into steps of at most `slot_nbytes` bytes; None when too few rows fit, or it is no matrix."""
    if len(shape) != 2 or tuple(shape) != byte_range.shape or not byte_range.nbytes:
        return None
    rows = slot_nbytes // (byte_range.nbytes // shape[0]) // _ROW_MULTIPLE * _ROW_MULTIPLE
    return RowSteps(byte_range, rows) if rows else None
