"""Quantiles, and the median of what is a number."""

import torch

from t2n_hf.ops.dims import product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.order import gathered, median_dim, sort
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.quantile.scalar, _aten.quantile.default)
def quantile(
    emit: Emit, x: Value, q: Operand, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Value:
    """Elements of an axis in order at a part of its length; NaN where there is one in it."""
    ordered, numbers = _in_order(emit, x, dim)
    last = ordered.rank - 1
    found = _interpolated(emit, ordered, _ranks(emit, q, ordered.shape[last] - 1, ordered), interpolation)
    all_numbers = emit.reduce("min_reduce", emit.cast(numbers, torch.int64), [last], keepdim=True)
    whole = emit.binary("gt", all_numbers, 0, torch.int64, torch.bool)
    return _placed(emit, emit.select(whole, found, float("nan"), x.dtype), q, dim, keepdim)


@_emits(_aten.nanquantile.scalar, _aten.nanquantile.default)
def nanquantile(
    emit: Emit, x: Value, q: Operand, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Value:
    """Elements of an axis in order at a part of the number of those that are no NaN."""
    ordered, numbers = _in_order(emit, x, dim)
    count = emit.reduce("sum_reduce", emit.cast(numbers, x.dtype), [ordered.rank - 1], keepdim=True)
    most = emit.binary("max", emit.binary("sub", count, 1, x.dtype), 0, x.dtype)
    found = _interpolated(emit, ordered, _ranks(emit, q, most, ordered), interpolation)
    some = emit.binary("gt", count, 0, x.dtype, torch.bool)
    return _placed(emit, emit.select(some, found, float("nan"), x.dtype), q, dim, keepdim)


@_emits(_aten.nanmedian.dim)
def nanmedian_dim(emit: Emit, x: Value, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """The lower of the elements in the middle of those of an axis that are no NaN, and a place that it has."""
    if x.rank == 0 or not x.dtype.is_floating_point:
        return median_dim(emit, x, dim, keepdim)
    axis = axis_of(dim, x.rank)
    numbers = emit.binary("eq", x, x, x.dtype, torch.bool)
    count = emit.reduce("sum_reduce", emit.cast(numbers, torch.int64), [axis], keepdim=True)
    last = emit.binary("max", emit.binary("sub", count, 1, torch.int64), 0, torch.int64)
    middle = emit.binary("div", last, 2, torch.int64)
    values, places = (
        gathered(emit, part, middle, axis) for part in sort(emit, emit.select(numbers, x, float("inf"), x.dtype), axis)
    )
    some = emit.binary("gt", count, 0, torch.int64, torch.bool)
    found = [emit.select(some, values, float("nan"), x.dtype), places]
    return found if keepdim else [emit.squeeze(part, [axis]) for part in found]


@_emits(_aten.nanmedian.default)
def nanmedian(emit: Emit, x: Value) -> Value:
    """The lower of the elements in the middle of all that are no NaN."""
    return nanmedian_dim(emit, emit.reshape(x, (product(x.shape),)), 0)[0]


def _in_order(emit: Emit, x: Value, dim: int | None) -> tuple[Value, Value]:
    """The axis in order as the last one, infinity for NaN; and which elements of it are numbers."""
    if dim is None or x.rank == 0:
        x = emit.reshape(x, (product(x.shape),))
    else:
        axis = axis_of(dim, x.rank)
        x = emit.transpose(x, [*(other for other in range(x.rank) if other != axis), axis])
    numbers = emit.binary("eq", x, x, x.dtype, torch.bool)
    return sort(emit, emit.select(numbers, x, float("inf"), x.dtype), -1)[0], numbers


def _ranks(emit: Emit, q: Operand, most: Operand, ordered: Value) -> Value:
    """Where in the axis each quantile is: [..., quantiles], of the rank of the axis' tensor."""
    kind = ordered.dtype
    given = emit.cast(q, kind) if isinstance(q, Value) else emit.tensor(q, kind, (1,))
    parts = emit.raised(emit.unsqueeze(given, [0]) if given.rank == 0 else given, ordered.rank)
    shape = (*ordered.shape[:-1], parts.shape[-1])
    return emit.broadcast(emit.binary("mul", parts, most, kind), shape)


def _interpolated(emit: Emit, ordered: Value, ranks: Value, interpolation: str) -> Value:
    kind = ordered.dtype
    whole = {"lower": "floor", "higher": "ceil", "nearest": "tract_core_round_even"}.get(interpolation)
    ranks = ranks if whole is None else emit.unary(whole, ranks)
    below = emit.unary("floor", ranks)
    low = gathered(emit, ordered, emit.cast(below, torch.int64), ordered.rank - 1)
    if whole is not None:
        return low
    above = emit.cast(emit.unary("ceil", ranks), torch.int64)
    high = gathered(emit, ordered, above, ordered.rank - 1)
    if interpolation == "midpoint":
        part = emit.tensor(0.5, kind, tuple(1 for _ in ranks.shape))
    else:
        part = emit.binary("sub", ranks, below, kind)
    # As torch does it, from the nearer one: beside infinity that is not the same.
    apart, rest = emit.binary("sub", high, low, kind), emit.binary("sub", 1.0, part, kind)
    from_low = emit.binary("add", low, emit.binary("mul", apart, part, kind), kind)
    from_high = emit.binary("sub", high, emit.binary("mul", apart, rest, kind), kind)
    return emit.select(emit.binary("gt", 0.5, part, kind, torch.bool), from_low, from_high, kind)


def _placed(emit: Emit, found: Value, q: Operand, dim: int | None, keepdim: bool) -> Value:
    """[..., quantiles] as torch gives it: the quantiles first, if they are a list, and the axis where it was."""
    last = found.rank - 1
    first = emit.transpose(found, [last, *range(last)])
    result = first if isinstance(q, Value) and q.rank == 1 else emit.squeeze(first, [0])
    return emit.reshape(result, emit.shape) if keepdim else result
