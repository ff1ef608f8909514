"""Normalisation by mean, variance or root mean square."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Shape
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["standardized", "weighted"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def standardized(emit: Emit, x: Value, axes: Sequence[int], eps: float) -> Value:
    """(x - mean) / sqrt(variance + eps) over axes; in f32, where f16 would lose the variance."""
    x = emit.cast(x, torch.float32) if x.dtype is torch.float16 else x
    mean = emit.reduce("mean_reduce", x, axes, keepdim=True)
    centred = emit.binary("sub", x, mean, x.dtype)
    square = emit.binary("mul", centred, centred, x.dtype)
    variance = emit.reduce("mean_reduce", square, axes, keepdim=True)
    scale = emit.unary("rsqrt", emit.binary("add", variance, eps, x.dtype))
    return emit.binary("mul", centred, scale, x.dtype)


def weighted(emit: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """`x * weight + bias`, of those that are there."""
    if weight is not None:
        x = emit.binary("mul", x, weight, x.dtype)
    if bias is not None:
        x = emit.binary("add", x, bias, x.dtype)
    return x


@_emits(_aten.layer_norm.default)
def layer_norm(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    normalized_shape: Shape,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    """Normalised over the last axes, then weighted."""
    axes = list(range(x.rank - len(normalized_shape), x.rank))
    return emit.cast(weighted(emit, standardized(emit, x, axes, eps), weight, bias), emit.dtype)


@_emits(_aten.rms_norm.default)
def rms_norm(
    emit: Emit, x: Value, normalized_shape: Shape, weight: Value | None = None, eps: float | None = None
) -> Value:
    """`x / sqrt(mean(x ** 2) + eps)` over the last axes, then weighted."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if len(normalized_shape) == 1:
        result = emit.unary("tract_core_rms_norm", x, axis=x.rank - 1, eps=float(eps))
    else:
        axes = list(range(x.rank - len(normalized_shape), x.rank))
        square = emit.binary("mul", x, x, x.dtype)
        mean = emit.reduce("mean_reduce", square, axes, keepdim=True)
        scale = emit.unary("rsqrt", emit.binary("add", mean, eps, x.dtype))
        result = emit.binary("mul", x, scale, x.dtype)
    return emit.cast(weighted(emit, result, weight, None), emit.dtype)


@_emits(_aten.native_layer_norm.default)
def native_layer_norm(
    emit: Emit, x: Value, normalized_shape: Shape, weight: Value | None, bias: Value | None, eps: float
) -> list[Value | None]:
    """Normalised over the last axes, then weighted; and where they are used, the mean and 1 / sqrt(variance + eps)."""
    normal = layer_norm(emit, x, normalized_shape, weight, bias, eps)
    if all(user.args[1] == 0 for user in emit.node.users):
        return [normal, None, None]
    axes = list(range(x.rank - len(normalized_shape), x.rank))
    mean = emit.reduce("mean_reduce", x, axes, keepdim=True)
    centred = emit.binary("sub", x, mean, x.dtype)
    variance = emit.reduce("mean_reduce", emit.binary("mul", centred, centred, x.dtype), axes, keepdim=True)
    return [normal, mean, emit.unary("rsqrt", emit.binary("add", variance, eps, x.dtype))]


@_emits(_aten.linalg_vector_norm.default)
def vector_norm(
    emit: Emit,
    x: Value,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    **_: object,
) -> Value:
    """(sum of abs(x) ** ord) ** (1 / ord) over axes."""
    axes = list(range(x.rank)) if dim is None or x.rank == 0 else [axis % x.rank for axis in dim]
    x = emit.cast(x, emit.dtype)
    if ord == 2:
        total = emit.reduce("sum_reduce", emit.binary("mul", x, x, x.dtype), axes, keepdim=keepdim)
        return emit.unary("sqrt", total)
    if ord == 0:
        other = emit.binary("ne", x, 0, x.dtype, torch.bool)
        return emit.reduce("sum_reduce", emit.cast(other, x.dtype), axes, keepdim=keepdim)
    size = emit.unary("abs", x)
    if ord in (float("inf"), float("-inf")):
        return emit.reduce("max_reduce" if ord > 0 else "min_reduce", size, axes, keepdim=keepdim)
    if ord == 1:
        return emit.reduce("sum_reduce", size, axes, keepdim=keepdim)
    total = emit.reduce("sum_reduce", emit.binary("pow", size, ord, x.dtype), axes, keepdim=keepdim)
    return emit.binary("pow", total, 1 / ord, x.dtype)
