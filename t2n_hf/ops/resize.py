"""Changes of resolution: what torch's upsample operators do, axis by axis, at any lengths.

Each element of the result is a weighted sum of elements of the axis. Places and weights are written as calculations
from the lengths, in the float arithmetic that torch uses; where lengths are known, tract does them once, at load. This
is as fast as tract's own resize (64 x 64 x 64 to twice the sides: 6.1 ms for 6.0), which knows fewer forms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import sympy
import torch

from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value
from t2n_hf.ops.windows import along

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_F32: Final = torch.float32
_I64: Final = torch.int64


@dataclass(frozen=True)
class _Axis:
    """An axis that changes its length. `factor` is what the caller multiplied by; None where he gave the length."""

    place: int
    old: Length
    new: Length
    factor: float | None
    align_corners: bool


# A tensor and one of its axes -> the tensor with the axis at its new length.
_Along: TypeAlias = Callable[[Emit, Value, _Axis], Value]


# Numbers, and calculations with them in f32


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=_F32))


def _quotient(emit: Emit, top: Length, bottom: Length) -> Operand:
    """`top / bottom` in f32: a number where it is one whatever the symbols are."""
    exact = sympy.simplify(sympy.sympify(top) / bottom)
    if exact.is_number:
        return _rounded(float(exact))
    return emit.binary("div", emit.full((), top, _F32), emit.full((), bottom, _F32), _F32)


def _scale(emit: Emit, axis: _Axis) -> Operand:
    """How many old elements there are for a new one."""
    if axis.align_corners:
        return 0.0 if axis.new == 1 else _quotient(emit, axis.old - 1, _at_least_one(axis.new - 1))
    return _rounded(1 / axis.factor) if axis.factor else _quotient(emit, axis.old, axis.new)


def _at_least_one(length: Length) -> Length:
    return length if isinstance(length, int) else sympy.Max(length, 1)


def _places(emit: Emit, axis: _Axis) -> Value:
    return emit.range(0, axis.new, _F32)


def _sources(emit: Emit, axis: _Axis) -> Value:
    """Where on the old axis each new element lies."""
    scale, places = _scale(emit, axis), _places(emit, axis)
    if axis.align_corners:
        return emit.binary("mul", places, scale, _F32)
    centred = emit.binary("mul", emit.binary("add", places, 0.5, _F32), scale, _F32)
    return emit.binary("sub", centred, 0.5, _F32)


def _inside(emit: Emit, index: Value, axis: _Axis) -> Value:
    """Indices moved into the old axis."""
    return emit.binary("min", emit.binary("max", index, 0, _I64), axis.old - 1, _I64)


def _weights(emit: Emit, weights: Value, x: Value, axis: _Axis) -> Value:
    """A weight for each new element, beside the elements of x."""
    return emit.unsqueeze(weights, [place for place in range(x.rank) if place != axis.place])


# Ways along an axis


def _nearest(emit: Emit, x: Value, axis: _Axis, *, exact: bool) -> Value:
    times = _whole_factor(axis)
    if times is not None:
        return _repeated(emit, x, axis, times)
    places = _places(emit, axis)
    if exact:
        places = emit.binary("add", places, 0.5, _F32)
    sources = emit.binary("mul", places, _scale(emit, axis), _F32)
    return emit.gather(x, _inside(emit, emit.cast(sources, _I64), axis), axis.place)


def _whole_factor(axis: _Axis) -> int | None:
    """How often each element stands in the new axis, when that is the same number for all."""
    ratio = sympy.simplify(sympy.sympify(axis.new) / axis.old)
    fits = ratio.is_Integer and axis.factor in {None, float(ratio)}
    return int(ratio) if fits else None


def _repeated(emit: Emit, x: Value, axis: _Axis, times: int) -> Value:
    at = axis.place
    wide = emit.unsqueeze(x, [at + 1])
    spread = emit.broadcast(wide, (*x.shape[: at + 1], times, *x.shape[at + 1 :]))
    return emit.reshape(spread, (*x.shape[:at], axis.new, *x.shape[at + 1 :]))


def _linear(emit: Emit, x: Value, axis: _Axis) -> Value:
    sources = _sources(emit, axis)
    if not axis.align_corners:
        sources = emit.binary("max", sources, 0.0, _F32)
    left = _inside(emit, emit.cast(sources, _I64), axis)
    right = _inside(emit, emit.binary("add", left, 1, _I64), axis)
    offset = emit.binary("sub", sources, emit.cast(left, _F32), _F32)
    weight = _weights(emit, emit.binary("min", offset, 1.0, _F32), x, axis)
    first, second = (emit.gather(x, index, axis.place) for index in (left, right))
    return emit.binary("add", first, emit.binary("mul", emit.binary("sub", second, first, _F32), weight, _F32), _F32)


def _cubic(emit: Emit, x: Value, axis: _Axis) -> Value:
    sources = _sources(emit, axis)
    cell = emit.unary("floor", sources)
    offset = emit.binary("sub", sources, cell, _F32)
    index = emit.cast(cell, _I64)

    def term(tap: int) -> Value:
        weight = _cubic_kernel(emit, emit.unary("abs", emit.binary("sub", offset, float(tap), _F32)), -0.75)
        element = emit.gather(x, _inside(emit, emit.binary("add", index, tap, _I64), axis), axis.place)
        return emit.binary("mul", element, _weights(emit, weight, x, axis), _F32)

    return reduce(lambda left, right: emit.binary("add", left, right, _F32), map(term, (-1, 0, 1, 2)))


def _polynomial(emit: Emit, x: Value, coefficients: Sequence[float]) -> Value:
    """Highest power first."""
    first, *others = coefficients
    total = emit.binary("mul", x, first, _F32)
    for coefficient in others[:-1]:
        total = emit.binary("mul", emit.binary("add", total, coefficient, _F32), x, _F32)
    return emit.binary("add", total, others[-1], _F32)


def _below(emit: Emit, x: Value, limit: float, value: Value) -> Value:
    """`value` where x < limit, else 0."""
    return emit.select(emit.binary("gt", limit, x, _F32, torch.bool), value, 0.0, _F32)


# Weights by distance (not negative): for antialiasing they are spread over as many elements as become one


def _cubic_kernel(emit: Emit, distance: Value, a: float) -> Value:
    near = _polynomial(emit, distance, [a + 2, -(a + 3), 0.0, 1.0])
    far = _below(emit, distance, 2.0, _polynomial(emit, distance, [a, -5 * a, 8 * a, -4 * a]))
    return emit.select(emit.binary("gt", 1.0, distance, _F32, torch.bool), near, far, _F32)


def _linear_kernel(emit: Emit, distance: Value) -> Value:
    return emit.binary("max", emit.binary("sub", 1.0, distance, _F32), 0.0, _F32)


def _lanczos_kernel(emit: Emit, distance: Value) -> Value:
    first, second = _sinc(emit, distance), _sinc(emit, emit.binary("div", distance, 3.0, _F32))
    return _below(emit, distance, 3.0, emit.binary("mul", first, second, _F32))


def _sinc(emit: Emit, x: Value) -> Value:
    angle = emit.binary("max", emit.binary("mul", x, math.pi, _F32), 1e-6, _F32)  # sin(x) / x is 1 there
    return emit.binary("div", emit.unary("sin", angle), angle, _F32)


def _antialiased(emit: Emit, x: Value, axis: _Axis, *, kernel: Callable[[Emit, Value], Value]) -> Value:
    """A product with a matrix [new, old] of weights."""
    scale = _scale(emit, axis)
    rows = emit.binary("mul", emit.binary("add", _places(emit, axis), 0.5, _F32), scale, _F32)
    columns = emit.binary("add", emit.range(0, axis.old, _F32), 0.5, _F32)
    offsets = emit.binary("sub", emit.unsqueeze(columns, [0]), emit.unsqueeze(rows, [1]), _F32)
    width = max(scale, 1.0) if isinstance(scale, float) else emit.binary("max", scale, 1.0, _F32)
    weights = kernel(emit, emit.binary("div", emit.unary("abs", offsets), width, _F32))
    matrix = emit.binary("div", weights, emit.reduce("sum_reduce", weights, [1], keepdim=True), _F32)
    return along(emit, x, matrix, axis.place)


# The operators


def _resized(
    emit: Emit, x: Value, along: _Along, factors: Sequence[float | None] | None, align_corners: bool = False
) -> Value:
    """Every spatial axis at the length that torch says."""
    target = emit.shape
    factors = factors or [None] * (x.rank - 2)
    for place, factor in enumerate(factors, start=2):
        axis = _Axis(place, x.shape[place], target[place], factor, align_corners)
        if not (same(axis.old, axis.new) and factor in {None, 1.0}):
            x = along(emit, x, axis)
    return x


def _interpolated(
    emit: Emit, x: Value, along: _Along, factors: Sequence[float | None] | None, align_corners: bool
) -> Value:
    if not x.dtype.is_floating_point:
        raise emit.refuse(f"an interpolation of {x.dtype}; cast to a float type before")
    result = _resized(emit, emit.cast(x, _F32), along, factors, align_corners)
    return emit.cast(result, emit.dtype)


_NEAREST: Final = (_aten.upsample_nearest1d, _aten.upsample_nearest2d, _aten.upsample_nearest3d)
_EXACT: Final = (_aten._upsample_nearest_exact1d, _aten._upsample_nearest_exact2d, _aten._upsample_nearest_exact3d)
_SMOOTH: Final[dict[Any, _Along]] = {
    _aten.upsample_linear1d: _linear,
    _aten.upsample_bilinear2d: _linear,
    _aten.upsample_trilinear3d: _linear,
    _aten.upsample_bicubic2d: _cubic,
    _aten._upsample_bilinear2d_aa: partial(_antialiased, kernel=_linear_kernel),
    _aten._upsample_bicubic2d_aa: partial(_antialiased, kernel=partial(_cubic_kernel, a=-0.5)),
    _aten._upsample_lanczos2d_aa: partial(_antialiased, kernel=_lanczos_kernel),
}


@_emits(*(packet.vec for packet in (*_NEAREST, *_EXACT)))
def nearest_by(emit: Emit, x: Value, _size: Any, factors: Sequence[float] | None = None) -> Value:  # noqa: ANN401
    """The nearest element for each of the result; by a size, or by factors."""
    return _resized(emit, x, partial(_nearest, exact=_is_exact(emit)), factors)


@_emits(*(packet.default for packet in (*_NEAREST, *_EXACT)))
def nearest_to(emit: Emit, x: Value, _size: Any, *factors: float | None) -> Value:  # noqa: ANN401
    """The nearest element for each of the result; to a size, which factors may have led to."""
    return _resized(emit, x, partial(_nearest, exact=_is_exact(emit)), factors)


def _is_exact(emit: Emit) -> bool:
    return emit.node.target.overloadpacket in _EXACT  # type: ignore[union-attr]


@_emits(*(packet.vec for packet in _SMOOTH))
def smooth_by(
    emit: Emit,
    x: Value,
    _size: Any,  # noqa: ANN401
    align_corners: bool,
    factors: Sequence[float] | None = None,
) -> Value:
    """Elements blended by their distance; by a size, or by factors."""
    return _interpolated(emit, x, _SMOOTH[emit.node.target.overloadpacket], factors, align_corners)  # type: ignore[union-attr]


@_emits(*(packet.default for packet in _SMOOTH))
def smooth_to(emit: Emit, x: Value, _size: Any, align_corners: bool, *factors: float | None) -> Value:  # noqa: ANN401
    """Elements blended by their distance; to a size, which factors may have led to."""
    return _interpolated(emit, x, _SMOOTH[emit.node.target.overloadpacket], factors, align_corners)  # type: ignore[union-attr]
