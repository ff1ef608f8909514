"""Which rows (items of the first axis) of a tensor an index needs, so that no other ones are read."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from t2n_hf.tensor.wrapper import opaque_to_final_tensor

__all__ = ["RowReader", "embedding_of_rows", "item_of_rows", "whole_number"]

# Gives the rows at ascending indices, or None when the whole tensor should be used instead.
RowReader = Callable[[Sequence[int]], torch.Tensor | None]


def embedding_of_rows(indices: torch.Tensor, count: int, read: RowReader) -> torch.Tensor | None:
    """Look `indices` (any shape) up in a table of `count` rows, reading each row that occurs once.

    None when most rows are needed, an index is out of range (left to F.embedding to report), or rows cannot be read.
    """
    if indices.numel() == 1:  # one token at a time, as when a text is generated
        index = int(indices)
        only = read([index]) if 0 <= index < count > 1 else None
        return None if only is None else opaque_to_final_tensor(only).reshape(*indices.shape, *only.shape[1:])
    unique, places = torch.unique(indices, return_inverse=True)
    wanted = unique.tolist()
    if not wanted or 2 * len(wanted) > count or wanted[0] < 0 or wanted[-1] >= count:
        return None
    rows = read(wanted)
    return None if rows is None else F.embedding(places.to(rows.device), rows)


def whole_number(head: Any) -> Any:  # noqa: ANN401 - any index
    """Give an index that is one whole number as an int, a bool as None, anything else as it is."""
    is_number = isinstance(head, torch.Tensor) and head.ndim == 0
    if is_number and not head.is_floating_point() and head.dtype is not torch.bool:
        return int(head)
    return None if isinstance(head, bool) else head


def item_of_rows(index: Any, count: int, read: RowReader) -> torch.Tensor | None:  # noqa: ANN401 - any index
    """Compute `tensor[index]` of a tensor with `count` rows, when `index` begins with a number or a slice of rows.

    A tensor of row numbers will do when it is all of the index. None when it is something else, when most rows are
    needed, or when rows cannot be read. Of a packed tensor the rows are packed, and give what the class gives.
    """
    head, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    head = whole_number(head)
    if isinstance(head, int) and -count <= head < count:
        rows = read([head % count])
        return None if rows is None else rows[(0, *rest) if rest else 0]
    if isinstance(head, slice):
        wanted = range(count)[head]
        if 0 < len(wanted) < count and wanted.step > 0:
            rows = read(wanted)
            return None if rows is None else rows[(slice(None), *rest) if rest else slice(None)]
    if isinstance(head, torch.Tensor) and not rest and head.dtype in (torch.int64, torch.int32):
        return _chosen(head, count, read)
    return None


def _chosen(index: torch.Tensor, count: int, read: RowReader) -> torch.Tensor | None:
    unique, places = torch.unique(torch.where(index < 0, index + count, index), return_inverse=True)
    wanted = unique.tolist()
    if not wanted or 2 * len(wanted) > count or wanted[0] < 0 or wanted[-1] >= count:
        return None
    rows = read(wanted)
    return None if rows is None else rows[places.to(rows.device)]
