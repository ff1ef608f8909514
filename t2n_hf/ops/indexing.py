"""Elements chosen by other tensors."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Length, broadcast_shapes, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["from_front", "result_axes"]

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
    return emit.gather(x, emit.reshape(emit.cast(index, torch.int64), emit.shape[axis : axis + 1]), axis)


@_emits(_aten.gather.default)
def gather(emit: Emit, x: Value, dim: int, index: Value, **_: object) -> Value:
    """For each place of `index`, the element of x at that place but for one axis, where `index` says."""
    if x.rank == 0:
        return emit.broadcast(x, index.shape)
    axis = axis_of(dim, x.rank)
    index = emit.cast(index, torch.int64)
    if index.rank == 0:  # one place of a list
        return emit.gather(x, index, axis)
    return emit.call("tract_core_gather_elements", x, index, out=(index.shape, x.dtype), axis=axis)


@_emits(_aten.take_along_dim.default)
def take_along_dim(emit: Emit, x: Value, indices: Value, dim: int | None = None) -> Value:
    """gather, with axes broadcast."""
    if dim is None:
        x, indices = (emit.reshape(part, (product(part.shape),)) for part in (x, indices))
        dim = 0
    axis = axis_of(dim, x.rank)
    joint = broadcast_shapes(x.shape, indices.shape)
    source = [*joint[:axis], x.shape[axis], *joint[axis + 1 :]]
    places = [*joint[:axis], indices.shape[axis], *joint[axis + 1 :]]
    return gather(emit, emit.broadcast(x, source), axis, emit.broadcast(indices, places))


def from_front(emit: Emit, index: Value, length: Length) -> Value:
    """Places counted from the end, as torch has them, counted from the front."""
    index = emit.cast(index, torch.int64)
    behind = emit.binary("gt", 0, index, torch.int64, torch.bool)
    return emit.select(behind, emit.binary("add", index, length, torch.int64), index, torch.int64)


@_emits(_aten.index.Tensor, _aten._unsafe_index.Tensor)
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
        return emit.gather(x, from_front(emit, place, x.shape[axes[0]]), axes[0])
    return _index_many(emit, x, axes, [from_front(emit, place, x.shape[axis]) for axis, place in used.items()])


def _index_many(emit: Emit, x: Value, axes: list[int], places: list[Value]) -> Value:
    """Several indices: the axes go to the front, the indices are joined into coordinates."""
    others = [axis for axis in range(x.rank) if axis not in axes]
    front = emit.transpose(x, axes + others)
    shape = broadcast_shapes(*(place.shape for place in places))
    columns = [emit.unsqueeze(emit.broadcast(place, shape), [len(shape)]) for place in places]
    coordinates = emit.concat(columns, len(shape), torch.int64)
    result = (*shape, *(x.shape[axis] for axis in others))
    chosen = emit.call("tract_core_gather_nd", front, coordinates, out=(result, x.dtype), batch_dims=0)
    return emit.transpose(chosen, result_axes(axes, len(shape), len(result)))


def result_axes(axes: list[int], count: int, rank: int) -> list[int]:
    """Where torch has the axes of x[indices].

    Of a result that has the `count` axes of the indices in front, the order that brings them to where torch has them:
    in the place of `axes`, the axes that are indexed, when those are side by side, else in front.
    """
    if axes[-1] - axes[0] != len(axes) - 1:
        return list(range(rank))
    before = axes[0]
    return [*range(count, count + before), *range(count), *range(count + before, rank)]


@_emits(_aten.take.default)
def take(emit: Emit, x: Value, index: Value) -> Value:
    """Elements of the flattened tensor."""
    total = product(x.shape)
    return emit.gather(emit.reshape(x, (total,)), from_front(emit, index, total), 0)


@_emits(_aten.one_hot.default)
def one_hot(emit: Emit, x: Value, num_classes: int = -1) -> Value:
    """Along a new last axis, 1 at the place that x says and 0 elsewhere."""
    if num_classes < 0:
        raise emit.refuse("one_hot without num_classes: the result's length depends on values; give num_classes")
    classes = emit.raised(emit.range(0, num_classes, x.dtype), x.rank + 1)
    hit = emit.binary("eq", emit.unsqueeze(x, [x.rank]), classes, x.dtype, torch.bool)
    return emit.cast(hit, emit.dtype)
