"""Functions that tract has no operator for, from those that it has."""

import math
from typing import Final

import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.dims import broadcast_shapes
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value

__all__ = ["angle_of", "polynomial"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def polynomial(emit: Emit, x: Value, coefficients: tuple[float, ...]) -> Value:
    """`c[0] * x**n + ... + c[n]`, by Horner's rule."""
    total: Value = emit.binary("mul", x, coefficients[0], x.dtype)
    for coefficient in coefficients[1:-1]:
        total = emit.binary("mul", emit.binary("add", total, coefficient, x.dtype), x, x.dtype)
    return emit.binary("add", total, coefficients[-1], x.dtype)


# Giles, "Approximating the erfinv function" (2010): single precision, relative error below 4e-7.
_ERFINV_MIDDLE: Final = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ERFINV_TAIL: Final = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


@_emits(_aten.erfinv.default, _aten.erfinv_.default, _aten.special_erfinv.default)
def erfinv(emit: Emit, x: Value) -> Value:
    """The number whose erf is x; infinite at -1 and 1. To single precision."""
    x = emit.cast(x, torch.float32)
    beside = emit.binary("mul", emit.binary("sub", 1, x, x.dtype), emit.binary("add", 1, x, x.dtype), x.dtype)
    depth = emit.unary("neg", emit.unary("log", beside))
    middle = polynomial(emit, emit.binary("sub", depth, 2.5, x.dtype), _ERFINV_MIDDLE)
    # The branch that is not taken must be finite, or its product with x = 0 is NaN.
    root = emit.unary("sqrt", emit.binary("max", depth, 5.0, x.dtype))
    tail = polynomial(emit, emit.binary("sub", root, 3, x.dtype), _ERFINV_TAIL)
    factor = emit.select(emit.binary("gt", 5.0, depth, x.dtype, torch.bool), middle, tail, x.dtype)
    value = emit.binary("mul", factor, x, x.dtype)
    end = compare(emit, "eq", emit.unary("abs", x), 1.0)
    endless = emit.binary("mul", x, float("inf"), x.dtype)
    return emit.cast(emit.select(end, endless, value, x.dtype), emit.dtype)


@_emits(_aten.special_ndtri.default)
def ndtri(emit: Emit, x: Value) -> Value:
    """The number below which a normal number is with probability x."""
    share = emit.binary("sub", emit.binary("mul", x, 2, emit.dtype), 1, emit.dtype)
    return emit.binary("mul", erfinv(emit, share), math.sqrt(2), emit.dtype)


# Lanczos, g = 7, n = 9.
_LANCZOS: Final = (
    *(676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059),
    *(12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7),
)


@_emits(_aten.lgamma.default)
def lgamma(emit: Emit, x: Value) -> Value:
    """Logarithm of the size of the gamma function."""
    kind = torch.float64  # terms of a thousand cancel; their factors are read in single precision
    x = emit.cast(x, kind)
    below = emit.binary("gt", 0.5, x, kind, torch.bool)
    above = emit.select(below, emit.binary("sub", 1, x, kind), x, kind)  # by reflection
    z = emit.binary("sub", above, 1, kind)
    total: Operand = 0.99999999999980993
    for place, coefficient in enumerate(_LANCZOS, start=1):
        term = emit.binary("div", coefficient, emit.binary("add", z, place, kind), kind)
        total = emit.binary("add", total, term, kind)
    shifted = emit.binary("add", z, 7.5, kind)
    power = emit.binary("mul", emit.binary("add", z, 0.5, kind), emit.unary("log", shifted), kind)
    size = emit.binary("add", power, 0.5 * math.log(2 * math.pi), kind)
    size = emit.binary("add", emit.binary("sub", size, shifted, kind), emit.unary("log", total), kind)  # type: ignore[arg-type]
    # Whole turns are taken away first: at the poles only what is left counts.
    rest = emit.binary("sub", x, emit.unary("floor", x), kind)
    sine = emit.unary("abs", emit.unary("sin", emit.binary("mul", rest, math.pi, kind)))
    reflected = emit.binary("sub", math.log(math.pi), emit.binary("add", emit.unary("log", sine), size, kind), kind)
    value = emit.select(below, reflected, size, kind)
    whole = compare(emit, "eq", x, emit.unary("floor", x))
    pole = emit.binary("tract_core_bitand", whole, compare(emit, "le", x, 0), torch.bool)
    return emit.cast(emit.select(pole, float("inf"), value, kind), emit.dtype)


@_emits(_aten.atan2.default, _aten.arctan2.default)
def atan2(emit: Emit, y: Operand, x: Operand) -> Value:
    """The angle of the point (x, y), from -pi to pi."""
    return angle_of(emit, emit.tensor(y, emit.dtype), emit.tensor(x, emit.dtype))


def angle_of(emit: Emit, y: Value, x: Value) -> Value:
    """The angle of the point (x, y), from -pi to pi."""
    kind = x.dtype
    origin = emit.binary("tract_core_bitand", compare(emit, "eq", x, 0), compare(emit, "eq", y, 0), torch.bool)
    # Of the origin 0 / 1; elsewhere the quotient as it is, infinite on the axis of y.
    quotient = emit.binary("div", y, emit.select(origin, 1, x, kind), kind)
    angle = emit.unary("atan", quotient)
    left = emit.binary("gt", 0, x, kind, torch.bool)
    half = emit.select(_negative(emit, y), -math.pi, math.pi, kind)
    return emit.select(left, emit.binary("add", angle, half, kind), angle, kind)


def _negative(emit: Emit, x: Value) -> Value:
    """Whether x is below 0. tract has no way to see the sign of -0: it counts as 0."""
    return emit.binary("gt", 0, x, x.dtype, torch.bool)


@_emits(_aten.angle.default)
def angle(emit: Emit, x: Value) -> Value:
    """The angle of a number: 0, or pi below 0."""
    turned = emit.select(compare(emit, "lt", x, 0), math.pi, 0.0, emit.dtype)
    if not x.dtype.is_floating_point:
        return turned
    return emit.select(compare(emit, "ne", x, x), x, turned, emit.dtype)


@_emits(_aten.copysign.Tensor, _aten.copysign.Scalar)
def copysign(emit: Emit, x: Operand, sign: Operand) -> Value:
    """The size of x with the sign of `sign`."""
    size = emit.unary("abs", emit.tensor(x, emit.dtype))
    if not isinstance(sign, Value):
        minus = math.copysign(1, float(sign)) < 0
        return emit.unary("neg", size) if minus else size
    return emit.select(compare(emit, "lt", sign, 0), emit.unary("neg", size), size, emit.dtype)


@_emits(_aten.signbit.default)
def signbit(emit: Emit, x: Value) -> Value:
    """Whether x is below 0."""
    return compare(emit, "lt", x, 0)


@_emits(_aten.hypot.default)
def hypot(emit: Emit, x: Value, y: Value) -> Value:
    """The distance of (x, y) from the origin."""
    kind = emit.dtype
    a, b = (emit.unary("abs", emit.cast(side, kind)) for side in (x, y))
    longer, shorter = (emit.binary(op, a, b, kind) for op in ("max", "min"))
    ratio = emit.binary("div", shorter, emit.select(compare(emit, "eq", longer, 0), 1, longer, kind), kind)
    root = emit.unary("sqrt", emit.binary("add", emit.binary("mul", ratio, ratio, kind), 1, kind))
    return emit.select(compare(emit, "eq", longer, float("inf")), longer, emit.binary("mul", longer, root, kind), kind)


@_emits(_aten.round.decimals)
def round_decimals(emit: Emit, x: Value, *, decimals: int = 0) -> Value:
    """`x` rounded to a number of decimals, halves to even."""
    if not x.dtype.is_floating_point:
        return x
    scale = float(10 ** abs(decimals))
    there, back = ("mul", "div") if decimals >= 0 else ("div", "mul")
    whole = emit.unary("tract_core_round_even", emit.binary(there, x, scale, x.dtype))
    return emit.binary(back, whole, scale, x.dtype)


@_emits(_aten.bitwise_left_shift.Tensor, _aten.bitwise_left_shift.Tensor_Scalar, _aten.__lshift__.Tensor)
@_emits(_aten.__lshift__.Scalar, _aten.bitwise_left_shift.Scalar_Tensor, _aten.__ilshift__.Scalar)
def left_shift(emit: Emit, x: Operand, count: Operand) -> Value:
    """`x * 2 ** count`, of integers."""
    return emit.binary("mul", x, _power_of_two(emit, count), emit.dtype)


@_emits(_aten.bitwise_right_shift.Tensor, _aten.bitwise_right_shift.Tensor_Scalar, _aten.__rshift__.Tensor)
@_emits(_aten.__rshift__.Scalar, _aten.bitwise_right_shift.Scalar_Tensor, _aten.__irshift__.Scalar)
def right_shift(emit: Emit, x: Operand, count: Operand) -> Value:
    """`x / 2 ** count`, of integers, rounded down."""
    value, divisor = emit.tensor(x, emit.dtype), _power_of_two(emit, count)
    quotient = emit.binary("div", value, divisor, emit.dtype)
    # tract divides towards zero.
    product = emit.binary("mul", quotient, divisor, emit.dtype)
    beyond = emit.cast(emit.binary("gt", product, value, emit.dtype, torch.bool), emit.dtype)
    return emit.binary("sub", quotient, beyond, emit.dtype)


def _power_of_two(emit: Emit, count: Operand) -> Operand:
    if emit.dtype.is_floating_point:
        raise emit.refuse("a shift of floating point numbers; multiply by a power of 2")
    if isinstance(count, int):
        return 2**count
    # Beyond 2**53 no float has all places of the power, but each of its powers of two is exact.
    power = emit.binary("pow", 2.0, emit.tensor(count, torch.float64), torch.float64)
    return emit.cast(power, emit.dtype)


@_emits(_aten.cosine_similarity.default)
def cosine_similarity(emit: Emit, left: Value, right: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """The product of two vectors, each divided by its length (at least `eps`), along an axis."""
    kind = emit.dtype
    a, b = (emit.cast(side, kind) for side in (left, right))
    rank = max(a.rank, b.rank)
    axis = dim % rank if rank else 0

    def over(x: Value, y: Value) -> Value:
        product = emit.binary("mul", x, y, kind)
        return emit.reduce("sum_reduce", product, [axis] if rank else [], keepdim=True)

    # A vector that is one number stands for as many as the other one has.
    shape = broadcast_shapes(a.shape, b.shape)
    a, b = emit.broadcast(a, shape), emit.broadcast(b, shape)
    units = [emit.binary("div", x, emit.binary("max", emit.unary("sqrt", over(x, x)), eps, kind), kind) for x in (a, b)]
    result = over(*units)
    return emit.squeeze(result, [axis]) if rank else result


_BY_PRODUCT: Final = 1  # torch's number for "use_mm_for_euclid_dist"


@_emits(_aten.cdist.default, _aten._cdist_forward.default, _aten._euclidean_dist.default)
def cdist(emit: Emit, left: Value, right: Value, p: float = 2.0, compute_mode: int | None = None) -> Value:
    """The distance of each row of `left` from each row of `right`; mode 1 is that of a product, as torch's own is."""
    kind = emit.dtype
    if p == 2 and compute_mode == _BY_PRODUCT:
        return _distances_by_product(emit, left, right)
    a, b = emit.unsqueeze(left, [left.rank - 1]), emit.unsqueeze(right, [right.rank - 2])
    steps = emit.unary("abs", emit.binary("sub", a, b, kind))
    last = [steps.rank - 1]
    if p == 0:
        return emit.reduce("sum_reduce", emit.cast(compare(emit, "ne", steps, 0), kind), last, keepdim=False)
    if p == 1:
        return emit.reduce("sum_reduce", steps, last, keepdim=False)
    if math.isinf(p):
        return emit.reduce("max_reduce", steps, last, keepdim=False)
    powers = emit.binary("mul", steps, steps, kind) if p == 2 else emit.binary("pow", steps, p, kind)
    total = emit.reduce("sum_reduce", powers, last, keepdim=False)
    return emit.unary("sqrt", total) if p == 2 else emit.binary("pow", total, 1 / p, kind)


def _distances_by_product(emit: Emit, left: Value, right: Value) -> Value:
    kind = emit.dtype

    def squares(x: Value) -> Value:
        return emit.reduce("sum_reduce", emit.binary("mul", x, x, kind), [x.rank - 1], keepdim=True)

    turned = squares(right)
    turned = emit.transpose(turned, [*range(turned.rank - 2), turned.rank - 1, turned.rank - 2])
    sums = emit.binary("add", squares(left), turned, kind)
    twice = emit.binary("mul", emit.matmul(left, right, transpose_right=True), 2.0, kind)
    return emit.unary("sqrt", emit.binary("max", emit.binary("sub", sums, twice, kind), 0.0, kind))
