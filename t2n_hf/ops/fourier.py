"""Fourier transforms, as products with the matrix of the transform: at any length, and one that is free too."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.complex import parts_of
from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import COMPLEX_EMITTERS, EMITTERS
from t2n_hf.ops.value import ComplexValue, Value
from t2n_hf.ops.windows import along

__all__: list[str] = []

_aten = torch.ops.aten


def _waves(emit: Emit, rows: Length, columns: Length, period: Length, dtype: torch.dtype) -> tuple[Value, Value]:
    """Cosine and sine of 2 pi * row * column / period, [rows, columns]."""
    down = emit.unsqueeze(emit.range(0, rows, torch.int64), [1])
    across = emit.unsqueeze(emit.range(0, columns, torch.int64), [0])
    steps = emit.binary("mul", down, across, torch.int64)
    # Whole turns are taken away while the numbers are exact.
    turns = emit.binary("div", steps, period, torch.int64)
    rest = emit.binary("sub", steps, emit.binary("mul", turns, period, torch.int64), torch.int64)
    share = emit.binary("div", emit.cast(rest, dtype), emit.tensor(period, dtype), dtype)
    angle = emit.binary("mul", share, 2 * math.pi, dtype)
    return emit.unary("cos", angle), emit.unary("sin", angle)


def _transformed(
    emit: Emit, x: ComplexValue | Value, axis: int, forward: bool, kept: Length | None = None
) -> ComplexValue:
    """The transform along an axis, or its first `kept` elements."""
    length, kind = x.shape[axis], x.dtype
    cosine, sine = _waves(emit, length if kept is None else kept, length, length, kind)
    real, imag = parts_of(emit, x, kind)
    if not isinstance(imag, Value):  # of real numbers
        waves = along(emit, real, sine, axis)  # type: ignore[arg-type]
        return ComplexValue(along(emit, real, cosine, axis), emit.unary("neg", waves) if forward else waves)  # type: ignore[arg-type]
    a, b = (along(emit, side, cosine, axis) for side in (real, imag))  # type: ignore[arg-type]
    c, d = (along(emit, side, sine, axis) for side in (real, imag))  # type: ignore[arg-type]
    plus, minus = ("add", "sub") if forward else ("sub", "add")
    return ComplexValue(emit.binary(plus, a, d, kind), emit.binary(minus, b, c, kind))


def _scaled(emit: Emit, x: Value, lengths: Sequence[Length], normalization: int) -> Value:
    """Divided by nothing (0), the root of the number of elements (1) or that number (2)."""
    if normalization == 0:
        return x
    count: Length = 1
    for length in lengths:
        count = count * length
    divisor = emit.tensor(count, x.dtype)
    return emit.binary("div", x, emit.unary("sqrt", divisor) if normalization == 1 else divisor, x.dtype)


def _both(emit: Emit, x: ComplexValue, lengths: Sequence[Length], normalization: int) -> ComplexValue:
    return ComplexValue(*(_scaled(emit, side, lengths, normalization) for side in (x.real, x.imag)))


def _known(*overloads: Any) -> Any:  # noqa: ANN401 - overloads; a decorator
    def register(emitter: Any) -> Any:  # noqa: ANN401 - an emitter
        EMITTERS.emits(*overloads)(emitter)
        return COMPLEX_EMITTERS.emits(*overloads)(emitter)

    return register


@_known(_aten._fft_c2c.default)
def fft_c2c(emit: Emit, x: ComplexValue, dim: Sequence[int], normalization: int, forward: bool) -> ComplexValue:
    """The transform of complex numbers along axes."""
    axes = [axis_of(axis, x.rank) for axis in dim]
    lengths = [x.shape[axis] for axis in axes]
    for axis in axes:
        x = _transformed(emit, x, axis, forward)
    return _both(emit, x, lengths, normalization)


@_known(_aten._fft_r2c.default)
def fft_r2c(emit: Emit, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> ComplexValue:
    """The transform of real numbers along axes; `onesided`: of the last axis the half that says all."""
    axes = [axis_of(axis, x.rank) for axis in dim]
    lengths = [x.shape[axis] for axis in axes]
    last = axes[-1]
    result = _transformed(emit, x, last, True, emit.shape[last] if onesided else None)
    for axis in axes[:-1]:
        result = _transformed(emit, result, axis, True)
    return _both(emit, result, lengths, normalization)


@_known(_aten._fft_c2r.default)
def fft_c2r(emit: Emit, x: ComplexValue, dim: Sequence[int], normalization: int, last_dim_size: Length) -> Value:
    """The way back to real numbers from the half of a transform that says all."""
    axes = [axis_of(axis, x.rank) for axis in dim]
    last, kind = axes[-1], x.dtype
    for axis in axes[:-1]:
        x = _transformed(emit, x, axis, False)
    half = x.shape[last]
    cosine, sine = _waves(emit, last_dim_size, half, last_dim_size, kind)
    # All but the first, and the one in the middle of an even length, stand for two.
    place = emit.range(0, half, torch.int64)
    ends = emit.binary(
        "tract_core_bitor",
        compare(emit, "eq", place, 0),
        compare(emit, "eq", emit.binary("mul", place, 2, torch.int64), last_dim_size),
        torch.bool,
    )
    weight = emit.unsqueeze(emit.select(ends, 1, 2, kind), [0])
    a = along(emit, x.real, emit.binary("mul", cosine, weight, kind), last)
    b = along(emit, x.imag, emit.binary("mul", sine, weight, kind), last)
    lengths = [last_dim_size if same(axis, last) else x.shape[axis] for axis in axes]
    return _scaled(emit, emit.binary("sub", a, b, kind), lengths, normalization)
