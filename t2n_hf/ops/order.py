"""Elements of an axis in order, and counts of elements between bounds."""

from typing import Any

import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.dims import Length, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Number, Value

__all__ = ["gathered", "median_dim", "sort"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.topk.default)
def topk(emit: Emit, x: Value, k: Length, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Value]:
    """The k greatest (or smallest) elements of an axis, in order, and their places."""
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    return _first(emit, x, k, axis_of(dim, x.rank), largest)


def _first(emit: Emit, x: Value, k: Length, axis: int, largest: bool) -> list[Value]:
    """The first k of an axis in order, equal elements in the order that they have, and their places."""
    numbers = emit.cast(x, torch.int64) if x.dtype is torch.bool else x
    if isinstance(k, int):
        shape = [*x.shape[:axis], k, *x.shape[axis + 1 :]]
        outs = [(shape, numbers.dtype), (shape, torch.int64)]
        values, places = emit.call_many("tract_core_topk", numbers, outs=outs, k=k, axis=axis, largest=largest)
    else:
        values, places = (emit.slice(part, axis, 0, k) for part in _ranked(emit, numbers, axis, largest))
    return [emit.cast(values, x.dtype), places]


def _ranked(emit: Emit, x: Value, axis: int, largest: bool) -> list[Value]:
    """A whole axis in order where its length is a symbol: each element is put at the number of those before it.

    tract orders a known number of elements only.
    """
    length = x.shape[axis]
    mine, other = emit.unsqueeze(x, [axis + 1]), emit.unsqueeze(x, [axis])
    before = compare(emit, "gt" if largest else "lt", other, mine)
    places = emit.range(0, length, torch.int64)
    earlier = emit.binary("gt", emit.unsqueeze(places, [1]), emit.unsqueeze(places, [0]), torch.int64, torch.bool)
    earlier = emit.unsqueeze(earlier, [n for n in range(x.rank + 1) if n not in (axis, axis + 1)])
    same = emit.binary("tract_core_bitand", compare(emit, "eq", other, mine), earlier, torch.bool)
    first = emit.binary("tract_core_bitor", before, same, torch.bool)
    ranks = emit.reduce("sum_reduce", emit.cast(first, torch.int64), [axis + 1], keepdim=False)
    along = emit.broadcast(emit.unsqueeze(places, [n for n in range(x.rank) if n != axis]), x.shape)
    outs = ((x.shape, x.dtype), (x.shape, torch.int64))
    zeros = (emit.full(x.shape, 0, x.dtype), emit.full(x.shape, 0, torch.int64))
    return [
        emit.call("tract_core_scatter_elements", zero, ranks, values, out=out, axis=axis)
        for zero, values, out in zip(zeros, (x, along), outs, strict=True)
    ]


@_emits(_aten.sort.default)
def sort(emit: Emit, x: Value, dim: int = -1, descending: bool = False) -> list[Value]:
    """An axis in order, equal elements in the order that they have, and the places its elements had."""
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    axis = axis_of(dim, x.rank)
    return _first(emit, x, x.shape[axis], axis, descending)


@_emits(_aten.sort.stable)
def sort_stable(
    emit: Emit, x: Value, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[Value]:
    """An axis in order, and the places its elements had."""
    return sort(emit, x, dim, descending)


@_emits(_aten.argsort.default)
def argsort(emit: Emit, x: Value, dim: int = -1, descending: bool = False) -> Value:
    """The places of an axis's elements in order."""
    return sort(emit, x, dim, descending)[1]


@_emits(_aten.argsort.stable)
def argsort_stable(emit: Emit, x: Value, stable: bool = True, dim: int = -1, descending: bool = False) -> Value:
    """The places of an axis's elements in order."""
    return argsort(emit, x, dim, descending)


@_emits(_aten.msort.default)
def msort(emit: Emit, x: Value) -> Value:
    """The first axis in order."""
    return sort(emit, x, 0)[0]


@_emits(_aten.kthvalue.default)
def kthvalue(emit: Emit, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """The k-th smallest element of an axis, and a place that it has."""
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    axis = axis_of(dim, x.rank)
    return [_at(emit, part, axis, k - 1, keepdim) for part in sort(emit, x, axis)]


def _at(emit: Emit, x: Value, axis: int, place: Length, keepdim: bool) -> Value:
    one = emit.slice(x, axis, place, place + 1)
    return one if keepdim else emit.squeeze(one, [axis])


@_emits(_aten.median.dim)
def median_dim(emit: Emit, x: Value, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """The lower of the elements in the middle of an axis in order, and a place that it has."""
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    axis = axis_of(dim, x.rank)
    return [_at(emit, part, axis, (x.shape[axis] - 1) // 2, keepdim) for part in sort(emit, x, axis)]


@_emits(_aten.median.default)
def median(emit: Emit, x: Value) -> Value:
    """The lower of the elements in the middle of all in order."""
    return median_dim(emit, emit.reshape(x, (product(x.shape),)), 0)[0]


# Counts


@_emits(_aten.bucketize.Tensor, _aten.bucketize.Scalar)
def bucketize(emit: Emit, x: Value | Number, boundaries: Value, out_int32: bool = False, right: bool = False) -> Value:
    """How many boundaries are below x (or equal to it, when `right`)."""
    value = emit.tensor(x, boundaries.dtype)
    wide, bounds = emit.unsqueeze(value, [value.rank]), emit.raised(boundaries, value.rank + 1)
    return _below(emit, bounds, wide, right)


@_emits(_aten.searchsorted.Tensor, _aten.searchsorted.Scalar)
def searchsorted(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    sorted_sequence: Value,
    values: Value | Number,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """How many elements of the last axis are below each value (or equal to it, when `right`)."""
    wanted = emit.tensor(values, sorted_sequence.dtype)
    sequence = emit.unsqueeze(sorted_sequence, [sorted_sequence.rank - 1])
    if sorted_sequence.rank == 1:
        sequence = emit.raised(sorted_sequence, wanted.rank + 1)
    # In which order the sequence is makes no difference for a count: the sorter is not needed.
    return _below(emit, sequence, emit.unsqueeze(wanted, [wanted.rank]), right or side == "right")


def _below(emit: Emit, bounds: Value, values: Value, right: bool) -> Value:
    last = max(bounds.rank, values.rank) - 1
    below = compare(emit, "le" if right else "lt", bounds, values)
    return emit.reduce("sum_reduce", emit.cast(below, emit.dtype), [last], keepdim=False)


@_emits(_aten.histc.default)
def histc(emit: Emit, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """How many elements are in each of `bins` parts, of one width, of what is from `min` to `max`."""
    flat = emit.reshape(emit.cast(x, torch.float32), (product(x.shape), 1))
    least: Any = float(min)
    most: Any = float(max)
    if least == most:
        raise emit.refuse("histc without bounds, which are then those of the values; give min and max")
    share = emit.binary("div", emit.binary("sub", flat, least, flat.dtype), most - least, flat.dtype)
    part = emit.unary("floor", emit.binary("mul", share, bins, flat.dtype))
    part = emit.select(compare(emit, "eq", flat, most), bins - 1, part, flat.dtype)
    numbers = emit.unsqueeze(emit.range(0, bins, torch.float32), [0])
    hits = emit.cast(compare(emit, "eq", part, numbers), torch.float32)
    return emit.cast(emit.reduce("sum_reduce", hits, [0], keepdim=False), emit.dtype)


@_emits(_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar, _aten.isin.Scalar_Tensor)
def isin(
    emit: Emit,
    elements: Value | Number,
    tested: Value | Number,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Value:
    """Whether each element is among those tested."""
    dtype = next(x.dtype for x in (elements, tested) if isinstance(x, Value))
    left, right = emit.tensor(elements, dtype), emit.tensor(tested, dtype)
    flat = emit.reshape(right, (product(right.shape),))
    found = compare(emit, "eq", emit.unsqueeze(left, [left.rank]), emit.raised(flat, left.rank + 1))
    hit = emit.reduce("any_reduce", found, [left.rank], keepdim=False)
    return emit.unary("not", hit) if invert else hit


@_emits(_aten.mode.default)
def mode(emit: Emit, x: Value, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """The most frequent element of an axis, the smallest of those; and the last place that it has."""
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    axis = axis_of(dim, x.rank)
    ordered, places = _first(emit, x, x.shape[axis], axis, False)
    equal = compare(emit, "eq", emit.unsqueeze(ordered, [axis + 1]), emit.unsqueeze(ordered, [axis]))
    counts = emit.reduce("sum_reduce", emit.cast(equal, torch.int64), [axis + 1], keepdim=False)
    first = emit.reduce("argmax_reduce", counts, [axis], keepdim=True, dtype=torch.int64)
    count = gathered(emit, counts, first, axis)
    last = emit.binary("sub", emit.binary("add", first, count, torch.int64), 1, torch.int64)
    found = [gathered(emit, part, last, axis) for part in (ordered, places)]
    return found if keepdim else [emit.squeeze(part, [axis]) for part in found]


def gathered(emit: Emit, x: Value, places: Value, axis: int) -> Value:
    """Of each line along an axis the elements at `places`, which has a line of places for each."""
    return emit.call("tract_core_gather_elements", x, places, out=(places.shape, x.dtype), axis=axis)
