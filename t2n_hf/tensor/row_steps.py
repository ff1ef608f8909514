"""A matrix in a file, read a few rows at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from t2n_hf.store.checkpoint import ByteRange

__all__ = ["RowSteps", "row_steps"]

# Products with so many rows, or a multiple, and at last with any number but one, give the numbers of a product with all
# rows bit for bit; with 93 rows, and with one, sums in f32 are ordered in another way, those in f64 with any number.
_ROW_MULTIPLE: Final = 64
_UNEQUAL: Final = "f64"


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
    """Cut a matrix (N, K) into steps of at most `slot_nbytes` bytes; None when it is none, or cannot be cut so."""
    if byte_range.dtype == _UNEQUAL or len(shape) != 2 or tuple(shape) != byte_range.shape or not byte_range.nbytes:
        return None
    rows = slot_nbytes // (byte_range.nbytes // shape[0]) // _ROW_MULTIPLE * _ROW_MULTIPLE
    while rows and shape[0] > 1 and shape[0] % rows == 1:
        rows -= _ROW_MULTIPLE
    return RowSteps(byte_range, rows) if rows else None
