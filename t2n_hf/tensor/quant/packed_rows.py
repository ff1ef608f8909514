"""What packed weights share: products, gathers and indexing that make a few rows dense at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from t2n_hf.errors import QuantizationError, UnsupportedOpError
from t2n_hf.tensor.fallback import materialise
from t2n_hf.tensor.product import dense_product
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["CHUNK_VALUES", "ROW_MULTIPLE", "PackedRows", "demand_blocks", "row_chunks", "why_no_blocks"]

# Values that are dense at once while a weight is read: few enough for a cache, enough rows for a fast product.
CHUNK_VALUES: Final = 1 << 20
# A kernel's layout is padded to a multiple of this many rows, the most that torch's kernel packs together (fewer divide
# it), and is read from multiples of it on: chunks start there.
ROW_MULTIPLE: Final = 64


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Split `rows` of `columns` values into ranges of about a million values, starting at multiples of 64."""
    step = max(ROW_MULTIPLE, CHUNK_VALUES // max(1, columns) // ROW_MULTIPLE * ROW_MULTIPLE)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def why_no_blocks(label: str, block_values: int, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    """Say why a format `label`, of blocks along the last axis, cannot hold such a tensor; None when it can."""
    if not dtype.is_floating_point:
        return f"its dtype is {dtype}, not a float"
    if len(shape) < 2:
        return f"it has {len(shape)} axes; {label} needs at least 2"
    if shape[-1] % block_values or 0 in shape:
        return f"its last axis has {shape[-1]} values; {label} packs blocks of {block_values}"
    return None


def demand_blocks(label: str, block_values: int, tensor: torch.Tensor, name: str = "") -> None:
    """Raise QuantizationError, naming `name`, for a `tensor` that the format cannot hold: see `why_no_blocks`."""
    reason = why_no_blocks(label, block_values, tensor.shape, tensor.dtype)
    if reason is not None:
        raise QuantizationError(
            f"{name or 'a tensor'} of shape {tuple(tensor.shape)} cannot be {label}: {reason}; "
            "leave its module unquantized"
        )


class PackedRows(OpaqueTensor):
    """Abstract: a weight (..., N, K) whose rows can be made dense a few at a time.

    A concrete class calls `_note_sizes` on each new instance, and defines `_dense_rows`, `_dense_rows_at` and
    `_item_at`. Products are exact: dense rows, then torch's own product.
    """

    _sizes: tuple[int, ...]
    _acts_as: torch.dtype

    def _note_sizes(self) -> None:
        # Every attribute of torch goes through __torch_function__, at about 2 us; a product reads these instead.
        self._sizes, self._acts_as = tuple(self.shape), self.dtype

    def _dense_rows(self, start: int, stop: int) -> torch.Tensor:
        """Give rows start..stop of a 2-D weight: (rows, K), in fresh memory."""
        raise UnsupportedOpError(f"{type(self).__name__} does not give its rows; define _dense_rows()")

    def _dense_rows_at(self, rows: torch.Tensor) -> torch.Tensor:
        """Give the rows at `rows`, i64 (T,), of a 2-D weight: (T, K). Raises IndexError outside 0..N-1."""
        raise UnsupportedOpError(f"{type(self).__name__} does not give its rows; define _dense_rows_at()")

    def _item_at(self, index: int) -> torch.Tensor:
        """Give the weight at `index` of the first axis of more than two, over the same memory."""
        raise UnsupportedOpError(f"{type(self).__name__} does not give its items; define _item_at()")

    def _item_name(self, index: int) -> str:
        return f"{self._name}[{index}]" if self._name else ""

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        sizes = self._sizes
        if len(sizes) != 2:
            return dense_product(x, materialise(self, "linear"), bias)
        if sizes[0] * sizes[1] <= CHUNK_VALUES:
            return dense_product(x, self._dense_rows(0, sizes[0]), bias)
        parts = []
        for start, stop in row_chunks(*sizes):
            rows = self._dense_rows(start, stop)
            parts.append(dense_product(x, rows, None if bias is None else bias[start:stop]))
        return torch.cat(parts, dim=-1)

    def _linear_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if len(self._sizes) != 2:
            return grad @ materialise(self, "linear_backward")
        total = None
        for start, stop in row_chunks(*self._sizes):
            part = grad[..., start:stop] @ self._dense_rows(start, stop)
            total = part if total is None else total.add_(part)
        return grad @ materialise(self, "linear_backward") if total is None else total

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        if len(self._sizes) != 2:
            return F.embedding(indices, materialise(self, "embedding"))
        return self._gathered(indices.reshape(-1).long()).view(*indices.shape, self._sizes[1])

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() * self._sizes[1] <= CHUNK_VALUES:
            return self._dense_rows_at(rows)
        chunks = row_chunks(rows.numel(), self._sizes[1])
        return torch.cat([self._dense_rows_at(rows[start:stop]) for start, stop in chunks])

    def _get_item(self, index: Any) -> torch.Tensor:  # noqa: ANN401 - whatever indexing takes
        count = self._sizes[0]
        if isinstance(index, torch.Tensor) and index.ndim == 0 and not index.dtype.is_floating_point:
            index = int(index) if index.dtype is not torch.bool else index
        if isinstance(index, int) and not isinstance(index, bool):
            if not -count <= index < count:
                raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
            index %= count
            return self._dense_rows(index, index + 1)[0] if len(self._sizes) == 2 else self._item_at(index)
        if len(self._sizes) == 2 and isinstance(index, slice):
            chosen = range(count)[index]
            return self._gathered(torch.arange(len(chosen), device=self.device) * chosen.step + chosen.start)
        if len(self._sizes) == 2 and isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
            rows = index.reshape(-1).long()
            return self._gathered(rows + (rows < 0) * count).view(*index.shape, self._sizes[1])
        return materialise(self, "getitem")[index]
