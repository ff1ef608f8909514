"""Rows of a table, summed, averaged or compared within bags."""

from typing import Any

import torch
from torch import fx

from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_SUM, _MEAN, _MOST = 0, 1, 2


@_emits(_aten.embedding_bag.default, _aten.embedding_bag.padding_idx)
@_emits(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def embedding_bag(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    table: Value,
    indices: Value,
    offsets: Value,
    _scale: bool = False,
    mode: int = _SUM,
    _sparse: bool = False,
    weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Any]:
    """The sum, the mean or the largest values of the rows of each bag, which begins at its offset.

    What is at `padding_idx` is in no bag. The other results are for training.
    """
    if any(user.args[1] != 0 and user.users for user in emit.node.users):
        raise emit.refuse("its results beside the first, which only training uses")
    indices = emit.cast(indices, torch.int64)
    rows = emit.gather(table, indices, 0)
    if weights is not None:
        rows = emit.binary("mul", rows, emit.unsqueeze(weights, [1]), rows.dtype)
    # [bags, elements of a bag, values], and which elements are in their bags.
    length = _length_of_bags(emit, indices.shape[0])
    if length is None:
        rows = emit.unsqueeze(rows, [0])
        inside = _within(emit, offsets, indices.shape[0], include_last_offset)
        indices = emit.unsqueeze(indices, [0])
    else:
        shape = (emit.shape[0], length)
        rows, indices, inside = emit.reshape(rows, (*shape, rows.shape[1])), emit.reshape(indices, shape), None
    if padding_idx is not None and padding_idx != -1:
        padding = padding_idx if padding_idx >= 0 else padding_idx + int(table.shape[0])
        real = emit.binary("ne", indices, padding, torch.int64, torch.bool)
        inside = real if inside is None else emit.binary("tract_core_bitand", inside, real, torch.bool)
    value = _joined(emit, rows, inside, mode)
    return [emit.cast(value, emit.dtype), *[None] * (len(emit.node.meta["val"]) - 1)]


def _length_of_bags(emit: Emit, total: Length) -> Length | None:
    """The one length of all bags, where the offsets are multiples of it; None where it is not known to be one."""
    offsets = emit.node.args[2]
    if not isinstance(offsets, fx.Node) or offsets.target is not _aten.arange.start_step:
        return None
    start, _, step = offsets.args[:3]
    step = emit.operand(step)
    return step if start == 0 and same(emit.shape[0] * step, total) else None


def _within(emit: Emit, offsets: Value, total: Length, include_last: bool) -> Value:
    """[bags, elements]: whether an element is in a bag."""
    offsets = emit.cast(offsets, torch.int64)
    count = emit.shape[0]
    begins = emit.slice(offsets, 0, 0, count) if include_last else offsets
    last = [] if include_last else [emit.tensor(total, torch.int64, (1,))]
    ends = emit.concat([emit.slice(offsets, 0, 1, offsets.shape[0]), *last], 0, torch.int64)
    places = emit.unsqueeze(emit.range(0, total, torch.int64), [0])
    begun = emit.binary("ge", places, emit.unsqueeze(begins, [1]), torch.int64, torch.bool)
    ended = emit.binary("lt", places, emit.unsqueeze(ends, [1]), torch.int64, torch.bool)
    return emit.binary("tract_core_bitand", begun, ended, torch.bool)


def _joined(emit: Emit, rows: Value, inside: Value | None, mode: int) -> Value:
    """The rows of each bag as one row; that of an empty bag is 0."""
    if inside is None:
        return emit.reduce(("sum_reduce", "mean_reduce", "max_reduce")[mode], rows, [1], keepdim=False)
    counts = emit.reduce("sum_reduce", emit.cast(inside, rows.dtype), [1], keepdim=True)
    if mode == _MOST:
        found = emit.select(emit.unsqueeze(inside, [2]), rows, float("-inf"), rows.dtype)
        most = emit.reduce("max_reduce", found, [1], keepdim=False)
        some = emit.binary("gt", counts, 0, rows.dtype, torch.bool)
        return emit.select(some, most, 0, rows.dtype)
    kept = emit.select(emit.unsqueeze(inside, [2]), rows, 0, rows.dtype)
    total = emit.reduce("sum_reduce", kept, [1], keepdim=False)
    if mode == _SUM:
        return total
    return emit.binary("div", total, emit.binary("max", counts, 1, rows.dtype), rows.dtype)
