"""Derivatives of the logarithm of the gamma function."""

import math
from typing import Final

import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.special import polynomial
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits

_KIND: Final = torch.float64  # sums of terms that nearly cancel
_STEPS: Final = 8  # from 1/2 at the least to where the series below are exact to single precision
# The Bernoulli numbers B2, B4, ... of the asymptotic series.
_BERNOULLI: Final = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)


@_emits(_aten.digamma.default, _aten.digamma_.default, _aten.special_digamma.default, _aten.special_psi.default)
def digamma(emit: Emit, x: Value) -> Value:
    """The derivative of the logarithm of gamma: -inf at 0, NaN at whole numbers below."""
    return _derivative(emit, x, 0)


@_emits(_aten.polygamma.default, _aten.special_polygamma.default)
def polygamma(emit: Emit, order: int, x: Value) -> Value:
    """The derivative of digamma of that order; order 0 is digamma itself."""
    return _derivative(emit, x, order)


def _derivative(emit: Emit, given: Value, order: int) -> Value:
    """Above 1/2 by recurrence and an asymptotic series (Abramowitz and Stegun, 6.3.18 and 6.4.11), else reflected."""
    x = emit.cast(given, _KIND)
    below = emit.binary("gt", 0.5, x, _KIND, torch.bool)
    value = _above(emit, emit.select(below, emit.binary("sub", 1, x, _KIND), x, _KIND), order)
    turned = value if order % 2 == 0 else emit.unary("neg", value)
    value = emit.select(below, emit.binary("sub", turned, _cotangents(emit, x, order), _KIND), value, _KIND)
    pole = emit.binary(
        "tract_core_bitand", compare(emit, "eq", x, emit.unary("floor", x)), compare(emit, "le", x, 0), torch.bool
    )
    sign = 1 if order % 2 else -1
    endless: Value | float = math.inf * sign
    if order == 0:
        endless = emit.select(compare(emit, "eq", x, 0), endless, math.nan, _KIND)
    return emit.cast(emit.select(pole, endless, value, _KIND), emit.dtype)


def _above(emit: Emit, y: Value, order: int) -> Value:
    """The function of what is 1/2 at the least."""
    z = emit.binary("add", y, _STEPS, _KIND)
    inverse = emit.binary("div", 1.0, z, _KIND)
    squared = emit.binary("mul", inverse, inverse, _KIND)
    factors = [
        number * math.factorial(2 * place + order - 1) / math.factorial(2 * place)
        for place, number in enumerate(_BERNOULLI, start=1)
    ]
    tail = emit.binary("mul", polynomial(emit, squared, tuple(reversed(factors))), squared, _KIND)
    if order == 0:
        start = emit.binary("sub", emit.unary("log", z), emit.binary("mul", inverse, 0.5, _KIND), _KIND)
        total = emit.binary("sub", start, tail, _KIND)
    else:
        half = emit.binary("mul", inverse, math.factorial(order) / 2, _KIND)
        start = emit.binary("add", half, math.factorial(order - 1), _KIND)
        total = emit.binary("mul", emit.binary("add", start, tail, _KIND), _power(emit, inverse, order), _KIND)
    for step in range(_STEPS):
        part = emit.binary("div", 1.0, emit.binary("add", y, step, _KIND), _KIND)
        term = emit.binary("mul", _power(emit, part, order + 1), math.factorial(order), _KIND)
        total = emit.binary("sub" if order == 0 else "add", total, term, _KIND)
    return total if order % 2 or order == 0 else emit.unary("neg", total)


def _power(emit: Emit, x: Value, exponent: int) -> Value:
    result = x
    for _ in range(exponent - 1):
        result = emit.binary("mul", result, x, _KIND)
    return result


def _cotangents(emit: Emit, x: Value, order: int) -> Value:
    """The derivative of `pi * cot(pi * x)` of that order, a polynomial of the cotangent."""
    # Whole turns are taken away first: near the poles only what is left counts.
    rest = emit.binary("mul", emit.binary("sub", x, emit.unary("floor", x), _KIND), math.pi, _KIND)
    cotangent = emit.binary("div", emit.unary("cos", rest), emit.unary("sin", rest), _KIND)
    factors = [0.0, 1.0]  # the lowest power first; the derivative of c is -pi * (1 + c * c)
    for _ in range(order):
        slopes = [-math.pi * place * factor for place, factor in enumerate(factors)][1:]
        factors = [a + b for a, b in zip([*slopes, 0.0, 0.0], [0.0, 0.0, *slopes], strict=True)]
    return emit.binary("mul", polynomial(emit, cotangent, tuple(reversed(factors))), math.pi, _KIND)
