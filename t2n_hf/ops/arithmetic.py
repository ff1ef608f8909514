"""Sums, products, quotients, powers and extremes, element by element."""

import math

import torch

from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value, is_number

__all__ = ["whole_remainder"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _is(operand: object, number: float) -> bool:
    return isinstance(operand, int | float) and not isinstance(operand, bool) and operand == number


def _scaled(emit: Emit, operand: Operand, factor: Operand) -> Operand:
    if _is(factor, 1):
        return operand
    if is_number(operand) and is_number(factor):
        return operand * factor  # type: ignore[operator]
    return emit.binary("mul", operand, factor, emit.dtype)


@_emits(_aten.add.Tensor, _aten.add.Scalar, _aten.add_.Tensor, _aten.add_.Scalar)
def add(emit: Emit, left: Operand, right: Operand, alpha: Operand = 1, **_: object) -> Value:
    """`left + alpha * right`; of two booleans their disjunction."""
    if emit.dtype is torch.bool:
        right = right if alpha else emit.full((), False, torch.bool)
        return emit.binary("tract_core_bitor", left, right, torch.bool)
    right = _scaled(emit, right, alpha)
    if _is(right, 0) and isinstance(left, Value) and left.shape == emit.shape:
        return emit.cast(left, emit.dtype)
    return emit.binary("add", left, right, emit.dtype)


@_emits(_aten.sub.Tensor, _aten.sub.Scalar, _aten.sub_.Tensor, _aten.sub_.Scalar, _aten.subtract.Tensor)
def sub(emit: Emit, left: Operand, right: Operand, alpha: Operand = 1, **_: object) -> Value:
    """`left - alpha * right`."""
    return emit.binary("sub", left, _scaled(emit, right, alpha), emit.dtype)


@_emits(_aten.rsub.Tensor, _aten.rsub.Scalar)
def rsub(emit: Emit, left: Operand, right: Operand, alpha: Operand = 1, **_: object) -> Value:
    """`right - alpha * left`."""
    return emit.binary("sub", right, _scaled(emit, left, alpha), emit.dtype)


@_emits(_aten.mul.Tensor, _aten.mul.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.multiply.Tensor)
def mul(emit: Emit, left: Operand, right: Operand, **_: object) -> Value:
    """`left * right`; of two booleans their conjunction."""
    if emit.dtype is torch.bool:
        return emit.binary("tract_core_bitand", left, right, torch.bool)
    if _is(right, 1) and isinstance(left, Value):
        return emit.cast(left, emit.dtype)
    if isinstance(left, Value) and left == right:
        return square(emit, left)
    return emit.binary("mul", left, right, emit.dtype)


@_emits(_aten.div.Tensor, _aten.div.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.true_divide.Tensor)
@_emits(_aten.divide.Tensor)
def div(emit: Emit, left: Operand, right: Operand, **_: object) -> Value:
    """`left / right`; integers give floats."""
    return emit.binary("div", left, right, emit.dtype)


@_emits(_aten.div.Tensor_mode, _aten.div.Scalar_mode, _aten.div_.Tensor_mode, _aten.div_.Scalar_mode)
def div_mode(emit: Emit, left: Operand, right: Operand, rounding_mode: str | None = None, **_: object) -> Value:
    """`left / right`, rounded as asked."""
    if rounding_mode is None:
        return div(emit, left, right)
    if rounding_mode == "floor":
        return floor_divide(emit, left, right)
    quotient = emit.binary("div", left, right, emit.dtype)
    return _truncated(emit, quotient) if emit.dtype.is_floating_point else quotient


def _truncated(emit: Emit, x: Value) -> Value:
    size = emit.unary("floor", emit.unary("abs", x))
    return emit.binary("mul", size, emit.unary("sign", x), x.dtype)


@_emits(_aten.floor_divide.default, _aten.floor_divide_.Tensor, _aten.floor_divide.Scalar)
def floor_divide(emit: Emit, left: Operand, right: Operand, **_: object) -> Value:
    """`left / right`, rounded down. tract divides integers towards zero, so the rest is taken away before."""
    dtype = emit.dtype
    if dtype.is_floating_point:
        return emit.unary("floor", emit.binary("div", left, right, dtype))
    return emit.binary("div", emit.binary("sub", left, remainder(emit, left, right), dtype), right, dtype)


@_emits(_aten.remainder.Tensor, _aten.remainder.Scalar, _aten.remainder_.Scalar, _aten.remainder.Scalar_Tensor)
def remainder(emit: Emit, left: Operand, right: Operand, **_: object) -> Value:
    """The rest of a division that rounds down; it has the sign of `right`."""
    dtype = emit.dtype
    if dtype.is_floating_point:
        whole = emit.unary("floor", emit.binary("div", left, right, dtype))
        return emit.binary("sub", left, emit.binary("mul", whole, right, dtype), dtype)
    return whole_remainder(emit, left, right, dtype)


def whole_remainder(emit: Emit, left: Operand, right: Operand, dtype: torch.dtype) -> Value:
    """`left % right` of whole numbers of `dtype`; it has the sign of `right`."""
    rest = _rest(emit, left, right, dtype)
    # A rest of the wrong sign is one divisor away from the right one.
    return _rest(emit, emit.binary("add", rest, right, dtype), right, dtype)


def _rest(emit: Emit, left: Operand, right: Operand, dtype: torch.dtype) -> Value:
    """What is left of a division that rounds towards zero, as tract's does of whole numbers."""
    quotient = emit.binary("div", left, right, dtype)
    return emit.binary("sub", left, emit.binary("mul", quotient, right, dtype), dtype)


@_emits(_aten.fmod.Tensor, _aten.fmod.Scalar)
def fmod(emit: Emit, left: Operand, right: Operand, **_: object) -> Value:
    """The rest of a division that rounds towards zero; it has the sign of `left`."""
    if not emit.dtype.is_floating_point:
        return _rest(emit, left, right, emit.dtype)
    quotient = _truncated(emit, emit.binary("div", left, right, emit.dtype))
    return emit.binary("sub", left, emit.binary("mul", quotient, right, emit.dtype), emit.dtype)


@_emits(_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.pow.Scalar, _aten.pow_.Scalar, _aten.pow_.Tensor)
def pow_(emit: Emit, base: Operand, exponent: Operand) -> Value:
    """`base ** exponent`."""
    dtype = emit.dtype
    if isinstance(base, Value) and isinstance(exponent, int | float):
        known = _known_power(emit, emit.cast(base, dtype), exponent)
        if known is not None:
            return known
    if dtype.is_floating_point:
        return emit.binary("pow", base, exponent, dtype)
    return emit.cast(emit.unary("tract_core_round_even", emit.binary("pow", base, exponent, torch.float32)), dtype)


def _known_power(emit: Emit, base: Value, exponent: float) -> Value | None:
    if exponent == 1:
        return base
    if exponent in (2, 3, 4):
        power = square(emit, base)
        if exponent == 2:
            return power
        return square(emit, power) if exponent == 4 else emit.binary("mul", power, base, base.dtype)
    names = {0.5: "sqrt", -0.5: "rsqrt", -1: "recip"}
    return emit.unary(names[exponent], base) if exponent in names and base.dtype.is_floating_point else None


@_emits(_aten.square.default)
def square(emit: Emit, x: Value) -> Value:
    """`x * x`. tract turns a product of a tensor with itself into its `square`, which has no integers."""
    x = emit.cast(x, emit.dtype)
    if x.dtype.is_floating_point:
        return emit.binary("mul", x, x, x.dtype)
    return emit.unary("neg", emit.binary("mul", emit.unary("neg", x), x, x.dtype))


@_emits(_aten.maximum.default, _aten.max.other, _aten.fmax.default)
def maximum(emit: Emit, left: Operand, right: Operand) -> Value:
    """The greater of two."""
    return extreme(emit, "max", left, right)


@_emits(_aten.minimum.default, _aten.min.other, _aten.fmin.default)
def minimum(emit: Emit, left: Operand, right: Operand) -> Value:
    """The smaller of two."""
    return extreme(emit, "min", left, right)


def extreme(emit: Emit, op: str, left: Operand, right: Operand) -> Value:
    """The greater ("max") or smaller ("min") of two; of booleans their disjunction or conjunction."""
    if emit.dtype is torch.bool:
        a, b = (emit.tensor(x, torch.bool) for x in (left, right))
        return emit.binary({"max": "tract_core_bitor", "min": "tract_core_bitand"}[op], a, b, torch.bool)
    return emit.binary(op, left, right, emit.dtype)


@_emits(_aten.clamp.default, _aten.clamp.Tensor, _aten.clamp_.default, _aten.clip.default, _aten.clip_.default)
@_emits(_aten.hardtanh_.default)
def clamp(emit: Emit, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    """x, at least `min` and at most `max`; `max` wins."""
    result = emit.cast(x, emit.dtype)
    if emit.dtype is torch.bool:
        lower = result if min is None else extreme(emit, "max", result, min)
        return lower if max is None else extreme(emit, "min", lower, max)
    if min is not None and not _is(min, -math.inf):
        result = emit.binary("max", result, min, emit.dtype)
    if max is not None and not _is(max, math.inf):
        result = emit.binary("min", result, max, emit.dtype)
    return result


@_emits(_aten.hardtanh.default)
def hardtanh(emit: Emit, x: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    """`x` between two numbers."""
    return clamp(emit, x, min_val, max_val)


@_emits(_aten.clamp_min.default, _aten.clamp_min_.default, _aten.clamp_min.Tensor)
def clamp_min(emit: Emit, x: Value, min: Operand) -> Value:
    """x, at least `min`."""
    return clamp(emit, x, min, None)


@_emits(_aten.clamp_max.default, _aten.clamp_max_.default, _aten.clamp_max.Tensor)
def clamp_max(emit: Emit, x: Value, max: Operand) -> Value:
    """x, at most `max`."""
    return clamp(emit, x, None, max)


@_emits(_aten.lerp.Scalar, _aten.lerp.Tensor)
def lerp(emit: Emit, start: Value, end: Value, weight: Operand) -> Value:
    """`start + weight * (end - start)`, from the nearer of both, as torch has it: beside infinity it matters."""
    dtype = emit.dtype
    way = emit.binary("sub", end, start, dtype)

    def from_start() -> Value:
        return emit.binary("add", start, emit.binary("mul", way, weight, dtype), dtype)

    def from_end() -> Value:
        return emit.binary("sub", end, emit.binary("mul", way, emit.binary("sub", 1, weight, dtype), dtype), dtype)

    if isinstance(weight, int | float):
        return from_start() if abs(weight) < 0.5 else from_end()
    small = emit.binary("gt", 0.5, emit.unary("abs", emit.tensor(weight, dtype)), dtype, torch.bool)
    return emit.select(small, from_start(), from_end(), dtype)


@_emits(_aten.addcmul.default)
def addcmul(emit: Emit, x: Value, left: Value, right: Value, value: Operand = 1) -> Value:
    """`x + value * left * right`."""
    product = _scaled(emit, emit.binary("mul", left, right, emit.dtype), value)
    return emit.binary("add", x, product, emit.dtype)


@_emits(_aten.addcdiv.default)
def addcdiv(emit: Emit, x: Value, left: Value, right: Value, value: Operand = 1) -> Value:
    """`x + value * left / right`."""
    quotient = _scaled(emit, emit.binary("div", left, right, emit.dtype), value)
    return emit.binary("add", x, quotient, emit.dtype)
