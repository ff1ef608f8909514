"""Normalisation of channels: batch, instance and group norm, and weights given as length and direction."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from t2n_hf.ops.dims import product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.normalization import standardized, weighted
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_F32: Final = torch.float32


def _by_channel(emit: Emit, value: Value, rank: int) -> Value:
    """A vector of channels, aligned with axis 1 of a tensor of `rank`."""
    return emit.unsqueeze(value, [axis for axis in range(rank) if axis != 1])


def _weighted(emit: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """A weight and a bias for each channel, then the dtype of the result."""
    by_channel = [None if v is None else _by_channel(emit, v, x.rank) for v in (weight, bias)]
    return emit.cast(weighted(emit, x, *by_channel), emit.dtype)


def _unused(emit: Emit, count: int) -> list[None]:
    """Results that only training needs: statistics of the batch."""
    for user in emit.node.users:
        if user.args[1] != 0 and user.users:
            raise emit.refuse(f"its result {user.args[1]}, statistics of the batch, which only training uses")
    return [None] * count


# Batch


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
    cudnn_enabled: bool = True,
) -> Value:
    """Shifted and scaled by the running statistics of each channel, or those of the batch where there are none."""
    if running_mean is None or running_var is None:
        axes = [axis for axis in range(x.rank) if axis != 1]
        return _weighted(emit, standardized(emit, x, axes, eps), weight, bias)
    if training:
        raise emit.refuse("batch norm that changes its running statistics; put the module in inference with eval()")
    mean, variance = emit.cast(running_mean, _F32), emit.cast(running_var, _F32)
    scale = emit.unary("rsqrt", emit.binary("add", variance, eps, _F32))
    if weight is not None:
        scale = emit.binary("mul", scale, weight, _F32)
    # All of this is known when the model is loaded: one product and one sum are left.
    shift = emit.unary("neg", emit.binary("mul", mean, scale, _F32))
    if bias is not None:
        shift = emit.binary("add", bias, shift, _F32)
    factor, term = (_by_channel(emit, emit.cast(value, emit.dtype), x.rank) for value in (scale, shift))
    return emit.binary("add", emit.binary("mul", x, factor, emit.dtype), term, emit.dtype)


@_emits(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def native_batch_norm(emit: Emit, *args: Any) -> list[Value | None]:  # noqa: ANN401 - those of batch_norm
    """The same, with statistics of the batch behind it."""
    return [batch_norm(emit, *args), *_unused(emit, 2)]


@_emits(_aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> list[Value | None]:
    """By the running statistics."""
    normal = batch_norm(emit, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return [normal, *_unused(emit, 2)]


@_emits(_aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(  # noqa: PLR0917 - the operator's own signature
    emit: Emit, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> list[Value | None]:
    """By the statistics of the batch."""
    return [batch_norm(emit, x, weight, bias, None, None, training, momentum, eps), *_unused(emit, 2)]


# Instance and group


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
    """Normalised within each channel of each element of the batch, or by running statistics."""
    if not use_input_stats:
        return batch_norm(emit, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return _weighted(emit, standardized(emit, x, list(range(2, x.rank)), eps), weight, bias)


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
    return _weighted(emit, emit.reshape(standardized(emit, grouped, [2], eps), x.shape), weight, bias)


@_emits(_aten.native_group_norm.default)
def native_group_norm(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: object,
    channels: object,
    rest: object,
    groups: int,
    eps: float,
) -> list[Value | None]:
    """The same, with statistics of the groups behind it."""
    return [group_norm(emit, x, groups, weight, bias, eps), *_unused(emit, 2)]


# Weights


def _length(emit: Emit, v: Value, kept: Sequence[int]) -> Value:
    """Root of the sum of squares over all axes but those kept; in f32, where f16 would overflow."""
    v = emit.cast(v, _F32)
    axes = [axis for axis in range(v.rank) if axis not in kept]
    return emit.unary("sqrt", emit.reduce("sum_reduce", emit.binary("mul", v, v, _F32), axes, keepdim=True))


def _kept(v: Value, dim: int) -> list[int]:
    """The axis that has a length for each place; torch means one length for all by -1."""
    return [] if dim == -1 else [axis_of(dim, v.rank)]


@_emits(_aten._weight_norm.default)
def weight_norm(emit: Emit, v: Value, g: Value, dim: int = 0) -> Value:
    """`v * (g / length of v)`, a length for each place of one axis."""
    scale = emit.binary("div", g, _length(emit, v, _kept(v, dim)), _F32)
    return emit.cast(emit.binary("mul", v, scale, _F32), emit.dtype)


@_emits(_aten._weight_norm_interface.default)
def weight_norm_interface(emit: Emit, v: Value, g: Value, dim: int = 0) -> list[Value]:
    """The same, with the lengths behind it."""
    return [weight_norm(emit, v, g, dim), emit.cast(_length(emit, v, _kept(v, dim)), g.dtype)]


@_emits(_aten.norm_except_dim.default)
def norm_except_dim(emit: Emit, v: Value, pow: int = 2, dim: int = 0) -> Value:
    """Length of v for each place of one axis."""
    if pow != 2:
        raise emit.refuse(f"norm_except_dim of power {pow}; only 2 is written")
    length = emit.cast(_length(emit, v, _kept(v, dim)), emit.dtype)
    return emit.reshape(length, emit.shape)
