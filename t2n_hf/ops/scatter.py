"""A tensor with some elements replaced, added to, or otherwise combined with others."""

from collections.abc import Sequence
from typing import Final

import torch

from t2n_hf.ops.dims import Length, Shape, broadcast_shapes, product, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.indexing import from_front, result_axes
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Number, Operand, Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits

# Names of reductions in torch -> in tract.
_REDUCTIONS: Final = {
    "add": "add",
    "amax": "max",
    "amin": "min",
    "mean": "add",
    "multiply": "mul",
    "prod": "mul",
    "sum": "add",
}


# At coordinates


@_emits(_aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index_put.default)
def index_put(
    emit: Emit, x: Value, indices: Sequence[Value | None], values: Operand, accumulate: bool = False
) -> Value:
    """`x` with `values` put (or added) at x[indices]."""
    places = {axis: place for axis, place in enumerate(indices) if place is not None}
    if any(place.dtype is torch.bool for place in places.values()):
        return _put_by_mask(emit, x, places, values, accumulate)
    axes = list(places)
    others = [axis for axis in range(x.rank) if axis not in axes]
    shape = broadcast_shapes(*(place.shape for place in places.values()))
    columns = [
        emit.unsqueeze(emit.broadcast(from_front(emit, place, x.shape[axis]), shape), [len(shape)])
        for axis, place in places.items()
    ]
    coordinates = emit.concat(columns, len(shape), torch.int64)
    # Where torch has the new axes in x[indices], scatter wants them in front.
    lengths = (*shape, *(x.shape[axis] for axis in others))
    back = result_axes(axes, len(shape), len(lengths))
    updates = emit.broadcast(emit.tensor(values, x.dtype), [lengths[axis] for axis in back])
    updates = emit.transpose(updates, _inverse(back))
    order = axes + others
    # Booleans have no sum in tract.
    kind = torch.int64 if accumulate and x.dtype is torch.bool else x.dtype
    front, updates = emit.cast(emit.transpose(x, order), kind), emit.cast(updates, kind)
    option = {"reduction": "add"} if accumulate else {}
    put = emit.call("tract_core_scatter_nd", front, coordinates, updates, out=(front.shape, kind), **option)
    return emit.cast(emit.transpose(put, _inverse(order)), x.dtype)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _put_by_mask(emit: Emit, x: Value, places: dict[int, Value], values: Operand, accumulate: bool) -> Value:
    if len(places) > 1 or accumulate:
        raise emit.refuse("index_put by a mask beside other indices, or that adds; use where() or masked_scatter()")
    ((axis, mask),) = places.items()
    rest = x.rank - axis - mask.rank
    mask = emit.unsqueeze(mask, [*range(axis), *range(x.rank - rest, x.rank)])
    if not isinstance(values, Value):
        return _select(emit, mask, values, x)
    # What the mask takes makes one axis, of an unknown length, of those that it covers.
    if values.rank < rest + 1 or same(values.shape[values.rank - rest - 1], 1):
        lengths = values.shape[values.rank - rest :] if values.rank > rest else values.shape
        before = values.shape[: values.rank - rest - 1] if values.rank > rest else ()
        aligned = (*before, *[1] * (x.rank - rest - len(before)), *lengths) if values.rank > rest else lengths
        return _select(emit, mask, emit.reshape(values, aligned), x)
    if axis > 0:
        raise emit.refuse("index_put by a mask after a whole axis, with a value for each place; use masked_scatter()")
    return masked_scatter(emit, x, mask, values)


def _select(emit: Emit, mask: Value, values: Operand, x: Value) -> Value:
    if x.dtype is not torch.bool:
        return emit.select(mask, values, x, x.dtype)
    chosen = emit.cast(values, torch.int64) if isinstance(values, Value) else int(values)
    return emit.cast(emit.select(mask, chosen, emit.cast(x, torch.int64), torch.int64), torch.bool)


@_emits(_aten.masked_scatter.default, _aten.masked_scatter_.default)
def masked_scatter(emit: Emit, x: Value, mask: Value, source: Value) -> Value:
    """`x` with the next element of `source` wherever the mask is set, in order."""
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, x = emit.broadcast(mask, shape), emit.broadcast(x, shape)
    total, supply = product(shape), product(source.shape)
    if same(supply, 0):
        return x
    count = emit.reshape(emit.cast(mask, torch.int64), (total,))
    sums = emit.unary("tract_core_cumsum", count, axis=0, exclusive=False, reverse=False)
    place = emit.binary("max", emit.binary("sub", sums, 1, torch.int64), 0, torch.int64)
    last = emit.full((), supply - 1, torch.int64)
    values = emit.cast(emit.reshape(source, (supply,)), x.dtype)
    chosen = emit.gather(values, emit.binary("min", place, last, torch.int64), 0)
    return _select(emit, mask, emit.reshape(chosen, shape), x)


@_emits(_aten.put.default, _aten.put_.default)
def put(emit: Emit, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """`x` with elements of `source` put (or added) at places of the flattened tensor."""
    if accumulate and x.dtype is torch.bool:
        numbers = put(emit, emit.cast(x, torch.int64), index, emit.cast(source, torch.int64), accumulate)
        return emit.cast(numbers, torch.bool)
    total = product(x.shape)
    places, values = (emit.reshape(part, (product(part.shape),)) for part in (index, source))
    flat = _scatter(emit, emit.reshape(x, (total,)), 0, from_front(emit, places, total), values, "add" * accumulate)
    return emit.reshape(flat, x.shape)


# Along an axis


def _scatter(emit: Emit, x: Value, axis: int, index: Value, values: Value, reduction: str = "") -> Value:
    option = {"reduction": reduction} if reduction else {}
    places = emit.cast(index, torch.int64)
    return emit.call("tract_core_scatter_elements", x, places, values, out=(x.shape, x.dtype), axis=axis, **option)


def _values(emit: Emit, x: Value, index: Value, source: Operand) -> Value:
    """The elements to put: as many as there are places, though torch lets the source have more."""
    values = emit.tensor(source, x.dtype, index.shape)
    if values.rank == 0:
        return emit.broadcast(values, index.shape)
    for axis, length in enumerate(index.shape):
        values = emit.slice(values, axis, 0, length)
    return values


@_emits(_aten.scatter.src, _aten.scatter_.src, _aten.scatter.value, _aten.scatter_.value)
@_emits(_aten.scatter.reduce, _aten.scatter_.reduce, _aten.scatter.value_reduce, _aten.scatter_.value_reduce)
def scatter(emit: Emit, x: Value, dim: int, index: Value, source: Operand, *, reduce: str = "") -> Value:
    """`x` with elements of `source` put (or added, or multiplied by) where `index` says along an axis."""
    if x.dtype is torch.bool and reduce:
        numbers = emit.tensor(source, torch.int64)
        return emit.cast(scatter(emit, emit.cast(x, torch.int64), dim, index, numbers, reduce=reduce), torch.bool)
    if x.rank == 0:
        return emit.reshape(scatter(emit, *_ranked(emit, x, dim, index, source), reduce=reduce), ())
    if index.rank == 0:
        x, dim, index, source = _ranked(emit, x, dim, index, source)
    values = _values(emit, x, index, source)
    return _scatter(emit, x, axis_of(dim, x.rank), index, values, _REDUCTIONS.get(reduce, ""))


def _ranked(emit: Emit, x: Value, dim: int, index: Value, source: Operand) -> tuple[Value, int, Value, Operand]:
    """The arguments of a scatter into one number, as tensors of rank 1."""
    parts = [
        emit.reshape(part, (1,)) if isinstance(part, Value) and part.rank == 0 else part for part in (x, index, source)
    ]
    return parts[0], 0, parts[1], parts[2]  # type: ignore[return-value]


@_emits(_aten.scatter_add.default, _aten.scatter_add_.default)
def scatter_add(emit: Emit, x: Value, dim: int, index: Value, source: Value) -> Value:
    """`x` with elements of `source` added where `index` says along an axis."""
    return scatter(emit, x, dim, index, source, reduce="add")


@_emits(_aten.scatter_reduce.two, _aten.scatter_reduce_.two)
def scatter_reduce(
    emit: Emit, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """`x` with elements of `source` combined where `index` says along an axis: their sum, prod, mean, amax or amin."""
    if x.dtype is torch.bool:
        x, source = emit.cast(x, torch.int64), emit.cast(source, torch.int64)
        numbers = scatter_reduce(emit, x, dim, index, source, reduce, include_self=include_self)
        return emit.cast(numbers, torch.bool)
    if x.rank == 0:
        x, dim, index, source = _ranked(emit, x, dim, index, source)  # type: ignore[assignment]
        return emit.reshape(scatter_reduce(emit, x, dim, index, source, reduce, include_self=include_self), ())
    if index.rank == 0:
        x, dim, index, source = _ranked(emit, x, dim, index, source)  # type: ignore[assignment]
    axis = axis_of(dim, x.rank)
    values = _values(emit, x, index, source)
    start = x if include_self else _scatter(emit, x, axis, index, emit.full(index.shape, _neutral(reduce, x), x.dtype))
    result = _scatter(emit, start, axis, index, values, _REDUCTIONS[reduce])
    if reduce != "mean":
        return result
    ones = emit.full(index.shape, 1, torch.int64)
    first = emit.full(x.shape, int(include_self), torch.int64)
    count = _scatter(emit, first, axis, index, ones, "add")
    count = emit.binary("max", count, 1, torch.int64)
    if x.dtype.is_floating_point:
        return emit.binary("div", result, count, x.dtype)
    exact = emit.binary("div", result, count, torch.float64)
    return emit.cast(emit.unary("floor", exact), x.dtype)


def _neutral(reduce: str, x: Value) -> Number:
    """What changes nothing when it is combined with another number."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if x.dtype.is_floating_point:
        return float("-inf") if reduce == "amax" else float("inf")
    limits = torch.iinfo(x.dtype)
    return limits.min if reduce == "amax" else limits.max


def _spread(emit: Emit, index: Value, axis: int, shape: Shape) -> Value:
    """A list of places along an axis, for each element of a tensor of `shape`."""
    rank = len(shape)
    places = emit.reshape(index, (product(index.shape),))
    return emit.broadcast(emit.unsqueeze(places, [other for other in range(rank) if other != axis]), shape)


@_emits(_aten.index_add.default, _aten.index_add_.default)
def index_add(emit: Emit, x: Value, dim: int, index: Value, source: Value, *, alpha: Number = 1) -> Value:
    """`x` with rows of `source` added to the rows that `index` says."""
    if alpha != 1:
        source = emit.binary("mul", source, alpha, source.dtype)
    return index_reduce(emit, x, dim, index, source, "sum")


@_emits(_aten.index_copy.default, _aten.index_copy_.default)
def index_copy(emit: Emit, x: Value, dim: int, index: Value, source: Value) -> Value:
    """`x` with the rows that `index` says replaced by those of `source`."""
    x, dim, source, shape = _rows(emit, x, dim, source)
    axis = axis_of(dim, x.rank)
    return emit.reshape(_scatter(emit, x, axis, _spread(emit, index, axis, source.shape), source), shape)


@_emits(_aten.index_reduce.default, _aten.index_reduce_.default)
def index_reduce(
    emit: Emit, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """`x` with rows of `source` combined with the rows that `index` says."""
    x, dim, source, shape = _rows(emit, x, dim, source)
    axis = axis_of(dim, x.rank)
    places = _spread(emit, index, axis, source.shape)
    return emit.reshape(scatter_reduce(emit, x, axis, places, source, reduce, include_self=include_self), shape)


def _rows(emit: Emit, x: Value, dim: int, source: Value) -> tuple[Value, int, Value, Shape]:
    """Numbers as tensors of rank 1; and the shape that the result has."""
    if x.rank > 0:
        return x, dim, emit.reshape(source, (1,) * x.rank) if source.rank == 0 else source, x.shape
    return emit.reshape(x, (1,)), 0, emit.reshape(source, (1,)), x.shape


@_emits(_aten.index_fill.int_Scalar, _aten.index_fill_.int_Scalar)
@_emits(_aten.index_fill.int_Tensor, _aten.index_fill_.int_Tensor)
def index_fill(emit: Emit, x: Value, dim: int, index: Value, value: Operand) -> Value:
    """`x` with one value in the rows that `index` says."""
    axis = axis_of(dim, x.rank)
    rows = (*x.shape[:axis], product(index.shape), *x.shape[axis + 1 :]) if x.rank else (1,)
    source = emit.broadcast(emit.tensor(value, x.dtype), rows)
    return index_copy(emit, x, dim, from_front(emit, index, x.shape[axis]) if x.rank else index, source)


# Parts


@_emits(_aten.slice_scatter.default)
def slice_scatter(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Length | None = None,
    end: Length | None = None,
    step: int = 1,
) -> Value:
    """`x` with a slice replaced."""
    axis = axis_of(dim, x.rank)
    length, count = x.shape[axis], source.shape[axis]
    begin: Length = 0 if start is None else start
    if isinstance(begin, int) and begin < 0:
        begin = length + begin
    if isinstance(begin, int) and isinstance(length, int):
        begin = min(max(begin, 0), length)
    source = emit.cast(source, x.dtype)
    if step != 1:
        places = emit.binary("mul", emit.range(0, count, torch.int64), step, torch.int64)
        places = emit.binary("add", places, begin, torch.int64)
        return _scatter(emit, x, axis, _spread(emit, places, axis, source.shape), source)
    stop = begin + count
    before = [] if same(begin, 0) else [emit.slice(x, axis, 0, begin)]
    after = [] if same(stop, length) else [emit.slice(x, axis, stop, length)]
    return emit.concat([*before, source, *after], axis, x.dtype)


@_emits(_aten.select_scatter.default)
def select_scatter(emit: Emit, x: Value, source: Value | Number, dim: int, index: Length) -> Value:
    """`x` with one element of an axis replaced."""
    axis, source = axis_of(dim, x.rank), emit.tensor(source, emit.dtype)
    begin = x.shape[axis] + index if isinstance(index, int) and index < 0 else index
    return slice_scatter(emit, x, emit.unsqueeze(source, [axis]), axis, begin)
