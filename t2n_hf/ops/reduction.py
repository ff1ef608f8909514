"""Sums, means, extremes and orders along axes."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from t2n_hf.ops.dims import product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _axes(x: Value, dim: int | Sequence[int] | None) -> list[int]:
    if x.rank == 0 or dim is None or (not isinstance(dim, int) and not dim):
        return list(range(x.rank))
    return [axis_of(axis, x.rank) for axis in ([dim] if isinstance(dim, int) else dim)]


@_emits(_aten.sum.default, _aten.sum.dim_IntList)
def sum_(emit: Emit, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, **_: object) -> Value:
    """Sum over axes."""
    if emit.dtype is torch.bool:
        return any_(emit, x, dim, keepdim)
    return emit.reduce("sum_reduce", emit.cast(x, emit.dtype), _axes(x, dim), keepdim=keepdim)


@_emits(_aten.mean.default, _aten.mean.dim)
def mean(emit: Emit, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, **_: object) -> Value:
    """Mean over axes."""
    return emit.reduce("mean_reduce", emit.cast(x, emit.dtype), _axes(x, dim), keepdim=keepdim)


@_emits(_aten.prod.default, _aten.prod.dim_int)
def prod(emit: Emit, x: Value, dim: int | None = None, keepdim: bool = False, **_: object) -> Value:
    """Product over axes."""
    if emit.dtype is torch.bool:
        return all_(emit, x, dim, keepdim)
    return emit.reduce("tract_core_product_reduce", emit.cast(x, emit.dtype), _axes(x, dim), keepdim=keepdim)


def _extreme(emit: Emit, op: str, x: Value, axes: list[int], keepdim: bool) -> Value:
    if x.dtype is torch.bool:
        return emit.cast(emit.reduce(op, emit.cast(x, torch.int64), axes, keepdim=keepdim), torch.bool)
    return emit.reduce(op, x, axes, keepdim=keepdim)


@_emits(_aten.amax.default, _aten.max.default)
def amax(emit: Emit, x: Value, dim: int | Sequence[int] = (), keepdim: bool = False) -> Value:
    """Greatest element over axes."""
    return _extreme(emit, "max_reduce", x, _axes(x, dim), keepdim)


@_emits(_aten.amin.default, _aten.min.default)
def amin(emit: Emit, x: Value, dim: int | Sequence[int] = (), keepdim: bool = False) -> Value:
    """Smallest element over axes."""
    return _extreme(emit, "min_reduce", x, _axes(x, dim), keepdim)


@_emits(_aten.aminmax.default)
def aminmax(emit: Emit, x: Value, *, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    """Smallest and greatest element, along an axis or of all."""
    ends = [amin(emit, x, () if dim is None else dim, keepdim), amax(emit, x, () if dim is None else dim, keepdim)]
    return [emit.reshape(end, emit.shape) for end in ends]


@_emits(_aten.max.dim)
def max_dim(emit: Emit, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """Greatest element along an axis, and its first place."""
    return [amax(emit, x, dim, keepdim), _place(emit, "argmax_reduce", x, dim, keepdim)]


@_emits(_aten.min.dim)
def min_dim(emit: Emit, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """Smallest element along an axis, and its first place."""
    return [amin(emit, x, dim, keepdim), _place(emit, "argmin_reduce", x, dim, keepdim)]


def _place(emit: Emit, op: str, x: Value, dim: int, keepdim: bool) -> Value:
    if x.rank == 0:
        return emit.full((), 0, torch.int64)
    x = emit.cast(x, torch.int64) if x.dtype is torch.bool else x
    return emit.reduce(op, x, _axes(x, dim), keepdim=keepdim, dtype=torch.int64)


@_emits(_aten.argmax.default)
def argmax(emit: Emit, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """First place of the greatest element, along an axis or in the flattened tensor."""
    return _argument(emit, "argmax_reduce", x, dim, keepdim)


@_emits(_aten.argmin.default)
def argmin(emit: Emit, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """First place of the smallest element, along an axis or in the flattened tensor."""
    return _argument(emit, "argmin_reduce", x, dim, keepdim)


def _argument(emit: Emit, op: str, x: Value, dim: int | None, keepdim: bool) -> Value:
    if dim is not None:
        return _place(emit, op, x, dim, keepdim)
    place = _place(emit, op, emit.reshape(x, (product(x.shape),)), 0, False)
    return emit.reshape(place, emit.shape)


@_emits(_aten.any.default, _aten.any.dim, _aten.any.dims)
def any_(emit: Emit, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """Whether any element is not zero."""
    return emit.reduce("any_reduce", emit.cast(x, torch.bool), _axes(x, dim), keepdim=keepdim)


@_emits(_aten.all.default, _aten.all.dim, _aten.all.dims)
def all_(emit: Emit, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """Whether no element is zero."""
    return emit.reduce("all_reduce", emit.cast(x, torch.bool), _axes(x, dim), keepdim=keepdim)


# The overloads without axes have the flag in the place of the axes.
_Axes: TypeAlias = int | Sequence[int] | bool | None


@_emits(_aten.var.correction, _aten.var.dim, _aten.var.default)
def var(
    emit: Emit, x: Value, dim: _Axes = None, unbiased: bool = True, keepdim: bool = False, **options: float | None
) -> Value:
    """Variance over axes, with a correction of the count."""
    return _moments(emit, x, dim, unbiased, keepdim, **options)[0]


@_emits(_aten.std.correction, _aten.std.dim, _aten.std.default)
def std(
    emit: Emit, x: Value, dim: _Axes = None, unbiased: bool = True, keepdim: bool = False, **options: float | None
) -> Value:
    """Standard deviation over axes, with a correction of the count."""
    return emit.unary("sqrt", var(emit, x, dim, unbiased, keepdim, **options))


@_emits(_aten.var_mean.correction, _aten.var_mean.dim, _aten.var_mean.default)
def var_mean(
    emit: Emit, x: Value, dim: _Axes = None, unbiased: bool = True, keepdim: bool = False, **options: float | None
) -> list[Value]:
    """Variance over axes, with a correction of the count, and mean."""
    variance, middle, axes = _moments(emit, x, dim, unbiased, keepdim, **options)
    return [variance, middle if keepdim else emit.squeeze(middle, axes)]


@_emits(_aten.std_mean.correction, _aten.std_mean.dim, _aten.std_mean.default)
def std_mean(
    emit: Emit, x: Value, dim: _Axes = None, unbiased: bool = True, keepdim: bool = False, **options: float | None
) -> list[Value]:
    """Standard deviation over axes, with a correction of the count, and mean."""
    variance, middle = var_mean(emit, x, dim, unbiased, keepdim, **options)
    return [emit.unary("sqrt", variance), middle]


def _moments(
    emit: Emit, x: Value, dim: _Axes, unbiased: bool, keepdim: bool, *, correction: float | None = None
) -> tuple[Value, Value, list[int]]:
    """Variance, the mean with its axes kept, and the axes."""
    if isinstance(dim, bool):
        unbiased, dim = dim, None
    taken = float(unbiased) if correction is None else correction
    axes = _axes(x, dim)
    middle = emit.reduce("mean_reduce", x, axes, keepdim=True)
    centred = emit.binary("sub", x, middle, x.dtype)
    square = emit.binary("mul", centred, centred, x.dtype)
    if taken == 0:
        return emit.reduce("mean_reduce", square, axes, keepdim=keepdim), middle, axes
    total = emit.reduce("sum_reduce", square, axes, keepdim=keepdim)
    count = product(x.shape[axis] for axis in axes)
    if float(taken).is_integer():
        return emit.binary("div", total, count - int(taken), x.dtype), middle, axes
    number = emit.binary("sub", emit.tensor(count, x.dtype), taken, x.dtype)
    return emit.binary("div", total, number, x.dtype), middle, axes


@_emits(_aten.logsumexp.default)
def logsumexp(emit: Emit, x: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    """Logarithm of the sum of exponentials."""
    axes = _axes(x, dim)
    x = emit.cast(x, emit.dtype)
    top = emit.reduce("max_reduce", x, axes, keepdim=True)
    total = emit.reduce("sum_reduce", emit.unary("exp", emit.binary("sub", x, top, x.dtype)), axes, keepdim=True)
    result = emit.binary("add", emit.unary("log", total), top, x.dtype)
    return result if keepdim else emit.squeeze(result, axes)
