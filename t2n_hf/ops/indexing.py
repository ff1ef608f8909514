"""Elements chosen by other tensors."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Length, broadcast_shapes, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.embedding.default)
def embedding(emit: Emit, weight: Value, indices: Value, *_: object, **__: object) -> Value:
    """Rows of a table."""
    return emit.gather(weight, emit.cast(indices, torch.int64), 0)


@_emits(_aten.index_select.default)
def index_select(emit: Emit, x: Value, dim: int, index: Value) -> Value:
    """Elements of an axis by a list of places."""
    axis = axis_of(dim, x.rank)
    if x.rank == 0:
        return x
    return emit.gather(x, emit.cast(index, torch.int64), axis)


@_emits(_aten.gather.default)
def gather(emit: Emit, x: Value, dim: int, index: Value, **_: object) -> Value:
    """For each place of `index`, the element of x at that place but for one axis, where `index` says."""
    axis = axis_of(dim, x.rank)
    return emit.call("tract_core_gather_elements", x, index, out=(index.shape, x.dtype), axis=axis)


@_emits(_aten.take_along_dim.default)
def take_along_dim(emit: Emit, x: Value, indices: Value, dim: int | None = None) -> Value:
    """gather, with axes broadcast."""
    if dim is None:
        raise emit.refuse("take_along_dim of the flattened tensor; name the axis")
    axis = axis_of(dim, x.rank)
    joint = broadcast_shapes(x.shape, indices.shape)
    source = [*joint[:axis], x.shape[axis], *joint[axis + 1 :]]
    places = [*joint[:axis], indices.shape[axis], *joint[axis + 1 :]]
    return gather(emit, emit.broadcast(x, source), axis, emit.broadcast(indices, places))


def _positive(emit: Emit, index: Value, length: Length) -> Value:
    """Places counted from the end, as torch has them, counted from the front."""
    index = emit.cast(index, torch.int64)
    behind = emit.binary("gt", 0, index, torch.int64, torch.bool)
    return emit.select(behind, emit.binary("add", index, length, torch.int64), index, torch.int64)


@_emits(_aten.index.Tensor)
def index(emit: Emit, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[indices]: one tensor of places for each of the first axes, None for a whole axis."""
    used = {axis: place for axis, place in enumerate(indices) if place is not None}
    if any(place.dtype is torch.bool for place in used.values()):
        raise emit.refuse("an index by a mask: the result's length depends on values; use where() or masked_fill()")
    axes = list(used)
    if len(axes) == 1:
        # Gathers take places from the end as they are, but those of block formats do not.
        place = used[axes[0]]
        if x.block is None:
            return emit.gather(x, emit.cast(place, torch.int64), axes[0])
        return emit.gather(x, _positive(emit, place, x.shape[axes[0]]), axes[0])
    return _index_many(emit, x, axes, [_positive(emit, place, x.shape[axis]) for axis, place in used.items()])


def _index_many(emit: Emit, x: Value, axes: list[int], places: list[Value]) -> Value:
    """Several indices: the axes go to the front, the indices are joined into coordinates."""
    others = [axis for axis in range(x.rank) if axis not in axes]
    front = emit.transpose(x, axes + others)
    shape = broadcast_shapes(*(place.shape for place in places))
    columns = [emit.unsqueeze(emit.broadcast(place, shape), [len(shape)]) for place in places]
    coordinates = emit.concat(columns, len(shape), torch.int64)
    result = (*shape, *(x.shape[axis] for axis in others))
    chosen = emit.call("tract_core_gather_nd", front, coordinates, out=(result, x.dtype), batch_dims=0)
    if axes[-1] - axes[0] != len(axes) - 1:  # not side by side: torch leaves the new axes in front
        return chosen
    before, rank = axes[0], len(shape)
    order = [*range(rank, rank + before), *range(rank), *range(rank + before, len(result))]
    return emit.transpose(chosen, order)


@_emits(_aten.index_put.default, _aten.index_put_.default)
def index_put(
    emit: Emit, x: Value, indices: Sequence[Value | None], values: Operand, accumulate: bool = False
) -> Value:
    """`x` with `values` put (or added) at x[indices]; by a mask, with one value for all its places."""
    places = [place for place in indices if place is not None]
    if len(places) < len(indices):
        raise emit.refuse("index_put with a whole axis before an index")
    if places[0].dtype is torch.bool:
        return _put_by_mask(emit, x, places, values, accumulate)
    shape = broadcast_shapes(*(place.shape for place in places))
    columns = [
        emit.unsqueeze(emit.broadcast(_positive(emit, place, x.shape[axis]), shape), [len(shape)])
        for axis, place in enumerate(places)
    ]
    coordinates = emit.concat(columns, len(shape), torch.int64)
    updates = emit.broadcast(emit.tensor(values, x.dtype), (*shape, *x.shape[len(places) :]))
    option = {"reduction": "add"} if accumulate else {}
    return emit.call("tract_core_scatter_nd", x, coordinates, updates, out=(x.shape, x.dtype), **option)


def _put_by_mask(emit: Emit, x: Value, places: list[Value], values: Operand, accumulate: bool) -> Value:
    if len(places) > 1 or accumulate or (isinstance(values, Value) and any(length != 1 for length in values.shape)):
        raise emit.refuse("index_put by a mask with a value for each place; use where() or masked_scatter()")
    mask = emit.unsqueeze(places[0], list(range(places[0].rank, x.rank)))
    value = emit.reshape(values, ()) if isinstance(values, Value) else values
    return emit.select(mask, value, x, x.dtype)


@_emits(_aten.scatter.src, _aten.scatter_.src, _aten.scatter.value, _aten.scatter_.value)
@_emits(_aten.scatter_add.default, _aten.scatter_add_.default)
def scatter(emit: Emit, x: Value, dim: int, index: Value, source: Operand, **_: object) -> Value:
    """`x` with elements of `source` put (or added) where `index` says along an axis."""
    axis = axis_of(dim, x.rank)
    values = emit.tensor(source, x.dtype, index.shape)
    if values.rank == 0:
        values = emit.broadcast(values, index.shape)
    for other, length in enumerate(index.shape):  # torch lets the source be longer than the index
        values = emit.slice(values, other, 0, length)
    adds = emit.node.target in (_aten.scatter_add.default, _aten.scatter_add_.default)
    option = {"reduction": "add"} if adds else {}
    return emit.call("tract_core_scatter_elements", x, index, values, out=(x.shape, x.dtype), axis=axis, **option)


@_emits(_aten.slice_scatter.default)
def slice_scatter(  # noqa: PLR0917 - the operator's own signature
    emit: Emit, x: Value, source: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """`x` with a slice replaced."""
    axis = axis_of(dim, x.rank)
    length = x.shape[axis]
    if step != 1:
        raise emit.refuse("slice_scatter with a step")
    begin: Length = 0 if start is None else start
    if isinstance(begin, int) and begin < 0:
        begin = length + begin
    stop = begin + source.shape[axis]
    before = [] if same(begin, 0) else [emit.slice(x, axis, 0, begin)]
    after = [] if same(stop, length) else [emit.slice(x, axis, stop, length)]
    return emit.concat([*before, source, *after], axis, x.dtype)


@_emits(_aten.select_scatter.default)
def select_scatter(emit: Emit, x: Value, source: Value, dim: int, index: int) -> Value:
    """`x` with one element of an axis replaced."""
    axis = axis_of(dim, x.rank)
    begin = x.shape[axis] + index if index < 0 else index
    return slice_scatter(emit, x, emit.unsqueeze(source, [axis]), axis, begin)


@_emits(_aten.masked_scatter.default)
def masked_scatter(emit: Emit, x: Value, mask: Value, source: Value) -> Value:
    """`x` with the next element of `source` wherever the mask is set, in order."""
    mask = emit.broadcast(mask, x.shape)
    flat = (emit.cast(mask, torch.int64),)
    count = emit.reshape(flat[0], (_total(x),))
    total = emit.unary("tract_core_cumsum", count, axis=0, exclusive=False, reverse=False)
    place = emit.binary("max", emit.binary("sub", total, 1, torch.int64), 0, torch.int64)
    last = emit.full((), _total(source) - 1, torch.int64)
    values = emit.reshape(source, (_total(source),))
    chosen = emit.gather(emit.cast(values, x.dtype), emit.binary("min", place, last, torch.int64), 0)
    return emit.select(mask, emit.reshape(chosen, x.shape), x, x.dtype)


def _total(x: Value) -> Length:
    total: Length = 1
    for length in x.shape:
        total = total * length
    return total
