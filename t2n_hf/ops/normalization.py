"""Normalisation by mean, variance or root mean square."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Shape, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _standardized(emit: Emit, x: Value, axes: Sequence[int], eps: float) -> Value:
    """(x - mean) / sqrt(variance + eps) over axes; in f32, where f16 would lose the variance."""
    x = emit.cast(x, torch.float32) if x.dtype is torch.float16 else x
    mean = emit.reduce("mean_reduce", x, axes, keepdim=True)
    centred = emit.binary("sub", x, mean, x.dtype)
    square = emit.binary("mul", centred, centred, x.dtype)
    variance = emit.reduce("mean_reduce", square, axes, keepdim=True)
    scale = emit.unary("rsqrt", emit.binary("add", variance, eps, x.dtype))
    return emit.binary("mul", centred, scale, x.dtype)


def _affine(emit: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
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
    return emit.cast(_affine(emit, _standardized(emit, x, axes, eps), weight, bias), emit.dtype)


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
    return emit.cast(_affine(emit, result, weight, None), emit.dtype)


@_emits(_aten.group_norm.default)
def group_norm(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Normalised within groups of channels, then weighted by channel."""
    batch, channels, *rest = x.shape
    grouped = emit.reshape(x, (batch, groups, channels // groups * product(rest)))
    normal = emit.reshape(_standardized(emit, grouped, [2], eps), x.shape)
    by_channel = [None if v is None else _by_channel(emit, v, x.rank) for v in (weight, bias)]
    return emit.cast(_affine(emit, normal, *by_channel), emit.dtype)


def _by_channel(emit: Emit, value: Value, rank: int) -> Value:
    """A vector of channels, aligned with axis 1 of a tensor of `rank`."""
    return emit.unsqueeze(value, [axis for axis in range(rank) if axis != 1])


@_emits(_aten.instance_norm.default)
def instance_norm(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value | None = None,
    bias: Value | None = None,
    running_mean: Value | None = None,
    running_var: Value | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Normalised within each channel, then weighted by channel."""
    if not use_input_stats:
        raise emit.refuse("instance_norm with running statistics")
    normal = _standardized(emit, x, list(range(2, x.rank)), eps)
    by_channel = [None if v is None else _by_channel(emit, v, x.rank) for v in (weight, bias)]
    return emit.cast(_affine(emit, normal, *by_channel), emit.dtype)


@_emits(_aten.batch_norm.default)
def batch_norm(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    """Shifted and scaled by the running statistics of each channel."""
    if training or running_mean is None or running_var is None:
        raise emit.refuse("batch_norm without running statistics; put the module in inference with eval()")
    scale = emit.unary("rsqrt", emit.binary("add", running_var, eps, running_var.dtype))
    if weight is not None:
        scale = emit.binary("mul", scale, weight, scale.dtype)
    centred = emit.binary("sub", x, _by_channel(emit, running_mean, x.rank), emit.dtype)
    scaled = emit.binary("mul", centred, _by_channel(emit, scale, x.rank), emit.dtype)
    if bias is None:
        return scaled
    return emit.binary("add", scaled, _by_channel(emit, bias, x.rank), emit.dtype)


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
    axes = list(range(x.rank)) if dim is None else [axis % x.rank for axis in dim]
    x = emit.cast(x, emit.dtype)
    if ord == 2:
        total = emit.reduce("sum_reduce", emit.binary("mul", x, x, x.dtype), axes, keepdim=keepdim)
        return emit.unary("sqrt", total)
    size = emit.unary("abs", x)
    if ord in (float("inf"), float("-inf")):
        return emit.reduce("max_reduce" if ord > 0 else "min_reduce", size, axes, keepdim=keepdim)
    if ord == 1:
        return emit.reduce("sum_reduce", size, axes, keepdim=keepdim)
    total = emit.reduce("sum_reduce", emit.binary("pow", size, ord, x.dtype), axes, keepdim=keepdim)
    return emit.binary("pow", total, 1 / ord, x.dtype)
