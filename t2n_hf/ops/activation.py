"""Activations."""

import math

import torch

from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.unary import log_one_plus
from t2n_hf.ops.value import Operand, Value

__all__ = ["softmax_over"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _positive(emit: Emit, x: Value) -> Value:
    return emit.binary("gt", x, 0, x.dtype, torch.bool)


@_emits(_aten.relu.default, _aten.relu_.default)
def relu(emit: Emit, x: Value) -> Value:
    """max(x, 0)."""
    return emit.binary("max", x, 0, x.dtype)


@_emits(_aten.relu6.default)
def relu6(emit: Emit, x: Value) -> Value:
    """`x` between 0 and 6."""
    return emit.binary("min", emit.binary("max", x, 0, x.dtype), 6, x.dtype)


@_emits(_aten.silu.default, _aten.silu_.default)
def silu(emit: Emit, x: Value) -> Value:
    """`x * sigmoid(x)`."""
    return emit.unary("tract_core_silu", x)


@_emits(_aten.gelu.default, _aten.gelu_.default)
def gelu(emit: Emit, x: Value, approximate: str = "none") -> Value:
    """`x` times the normal distribution function of x, exact or by tanh."""
    if approximate == "tanh":
        return emit.unary("tract_core_gelu_approx", x, fast_impl=False)
    erf = emit.unary("tract_core_erf", emit.binary("mul", x, math.sqrt(0.5), x.dtype))
    share = emit.binary("mul", emit.binary("add", erf, 1, x.dtype), 0.5, x.dtype)
    return emit.binary("mul", x, share, x.dtype)


@_emits(_aten.leaky_relu.default, _aten.leaky_relu_.default)
def leaky_relu(emit: Emit, x: Value, negative_slope: float = 0.01) -> Value:
    """`x` above 0, `x * negative_slope` below."""
    return emit.select(_positive(emit, x), x, emit.binary("mul", x, negative_slope, x.dtype), x.dtype)


@_emits(_aten.rrelu.default, _aten.rrelu_.default)
def rrelu(
    emit: Emit, x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: object
) -> Value:
    """`x` above 0, `x` times the mean of the bounds below."""
    if training:
        raise emit.refuse("it is random in training; put the module in inference with eval()")
    return leaky_relu(emit, x, (lower + upper) / 2)


@_emits(_aten.prelu.default)
def prelu(emit: Emit, x: Value, weight: Value) -> Value:
    """`x` above 0, `x` times the weight of its channel below."""
    if x.rank > 1 and weight.rank == 1:
        weight = emit.unsqueeze(weight, [axis for axis in range(x.rank) if axis != 1])
    return emit.select(_positive(emit, x), x, emit.binary("mul", x, weight, x.dtype), x.dtype)


@_emits(_aten.elu.default, _aten.elu_.default)
def elu(emit: Emit, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    """`x` above 0, `alpha * (exp(x) - 1)` below, both scaled."""
    # The branch that is not taken must not overflow.
    below = emit.binary("mul", emit.binary("min", x, 0, x.dtype), input_scale, x.dtype)
    curve = emit.binary("mul", emit.binary("sub", emit.unary("exp", below), 1, x.dtype), alpha, x.dtype)
    result = emit.select(_positive(emit, x), x, curve, x.dtype)
    return result if scale == 1 else emit.binary("mul", result, scale, x.dtype)


@_emits(_aten.selu.default)
def selu(emit: Emit, x: Value) -> Value:
    """`elu` with the constants that keep mean and variance."""
    return elu(emit, x, 1.6732632423543772, 1.0507009873554805)


@_emits(_aten.celu.default)
def celu(emit: Emit, x: Value, alpha: float = 1.0) -> Value:
    """`x` above 0, `alpha * (exp(x / alpha) - 1)` below."""
    return elu(emit, x, alpha, 1.0, 1 / alpha)


@_emits(_aten.softplus.default)
def softplus(emit: Emit, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    """log(1 + exp(beta * x)) / beta; x itself where beta * x passes the threshold."""
    scaled = emit.binary("mul", x, beta, x.dtype)
    size = emit.unary("abs", scaled)
    # log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), which never overflows
    tail = log_one_plus(emit, emit.unary("exp", emit.unary("neg", size)))
    total = emit.binary("add", emit.binary("max", scaled, 0, x.dtype), tail, x.dtype)
    curve = emit.binary("mul", total, 1 / beta, x.dtype)
    return emit.select(emit.binary("gt", scaled, threshold, x.dtype, torch.bool), x, curve, x.dtype)


@_emits(_aten.log_sigmoid.default)
def log_sigmoid(emit: Emit, x: Value) -> Value:
    """log(sigmoid(x))."""
    size = emit.unary("neg", emit.unary("abs", x))
    tail = log_one_plus(emit, emit.unary("exp", size))
    return emit.binary("sub", emit.binary("min", x, 0, x.dtype), tail, x.dtype)


@_emits(_aten.mish.default)
def mish(emit: Emit, x: Value) -> Value:
    """`x * tanh(softplus(x))`."""
    return emit.binary("mul", x, emit.unary("tanh", softplus(emit, x)), x.dtype)


@_emits(_aten.hardsigmoid.default, _aten.hardsigmoid_.default)
def hardsigmoid(emit: Emit, x: Value) -> Value:
    """(x + 3) / 6 between 0 and 1."""
    raised = emit.binary("max", emit.binary("add", x, 3, x.dtype), 0, x.dtype)
    return emit.binary("mul", emit.binary("min", raised, 6, x.dtype), 1 / 6, x.dtype)


@_emits(_aten.hardswish.default, _aten.hardswish_.default)
def hardswish(emit: Emit, x: Value) -> Value:
    """`x * hardsigmoid(x)`."""
    return emit.binary("mul", x, hardsigmoid(emit, x), x.dtype)


@_emits(_aten.threshold.default, _aten.threshold_.default)
def threshold_(emit: Emit, x: Value, threshold: Operand, value: Operand) -> Value:
    """`x` above the threshold, else value."""
    return emit.select(emit.binary("gt", x, threshold, x.dtype, torch.bool), x, value, x.dtype)


def softmax_over(emit: Emit, x: Value, axis: int, dtype: torch.dtype) -> Value:
    """Softmax along an axis, computed and given in `dtype`."""
    if x.rank == 0:
        return emit.full((), 1, dtype)
    return emit.call("softmax", emit.cast(x, dtype), out=(x.shape, dtype), axes=[axis % x.rank])


@_emits(_aten.softmax.int, _aten._softmax.default)
def softmax(emit: Emit, x: Value, dim: int, *_: object, **__: object) -> Value:
    """Exponentials that sum to one along an axis."""
    return softmax_over(emit, x, dim, emit.dtype)


@_emits(_aten._safe_softmax.default)
def safe_softmax(emit: Emit, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax that gives zeros where all of an axis is minus infinity."""
    result = softmax_over(emit, x, dim, emit.dtype)
    # Not by the greatest element: of nothing but minus infinity tract's is the least finite number.
    endless = emit.binary("eq", x, float("-inf"), x.dtype, torch.bool)
    nothing = emit.reduce("all_reduce", endless, [dim % x.rank] if x.rank else [], keepdim=True)
    return emit.select(nothing, 0, result, emit.dtype)


@_emits(_aten.log_softmax.int, _aten._log_softmax.default)
def log_softmax(emit: Emit, x: Value, dim: int, *_: object, **__: object) -> Value:
    """Logarithm of the softmax, without its underflow."""
    x = emit.cast(x, emit.dtype)
    axes = [dim % x.rank] if x.rank else []
    shifted = emit.binary("sub", x, emit.reduce("max_reduce", x, axes, keepdim=True), x.dtype)
    total = emit.reduce("sum_reduce", emit.unary("exp", shifted), axes, keepdim=True)
    return emit.binary("sub", shifted, emit.unary("log", total), x.dtype)
