"""Modified Bessel functions, and error functions scaled by what they vanish with, to single precision."""

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

# Abramowitz and Stegun, 9.8.1 to 9.8.4: polynomials of (x / 3.75) ** 2 below 3.75, of 3.75 / x above.
_BOUND: Final = 3.75
_I0_BELOW: Final = (0.0045813, 0.0360768, 0.2659732, 1.2067492, 3.0899424, 3.5156229, 1.0)
_I0_ABOVE: Final = (
    *(0.00392377, -0.01647633, 0.02635537, -0.02057706, 0.00916281),
    *(-0.00157565, 0.00225319, 0.01328592, 0.39894228),
)
_I1_BELOW: Final = (0.00032411, 0.00301532, 0.02658733, 0.15084934, 0.51498869, 0.87890594, 0.5)
_I1_ABOVE: Final = (
    *(-0.00420059, 0.01787654, -0.02895312, 0.02282967, -0.01031555),
    *(0.00163801, -0.00362018, -0.03988024, 0.39894228),
)
# Press et al., "Numerical Recipes", erfcc: relative error below 1.2e-7 everywhere.
_ERFCX: Final = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
_KIND: Final = torch.float32


@_emits(_aten.i0.default, _aten.i0_.default, _aten.special_i0.default)
def i0(emit: Emit, x: Value) -> Value:
    """The modified Bessel function of order 0."""
    return _bessel(emit, x, 0, scaled=False)


@_emits(_aten.special_i0e.default)
def i0e(emit: Emit, x: Value) -> Value:
    """`i0(x) * exp(-abs(x))`."""
    return _bessel(emit, x, 0, scaled=True)


@_emits(_aten.special_i1.default)
def i1(emit: Emit, x: Value) -> Value:
    """The modified Bessel function of order 1."""
    return _bessel(emit, x, 1, scaled=False)


@_emits(_aten.special_i1e.default)
def i1e(emit: Emit, x: Value) -> Value:
    """`i1(x) * exp(-abs(x))`."""
    return _bessel(emit, x, 1, scaled=True)


def _bessel(emit: Emit, given: Value, order: int, *, scaled: bool) -> Value:
    x = emit.cast(given, _KIND)
    size = emit.unary("abs", x)
    near = emit.binary("min", size, _BOUND, _KIND)  # the branch that is not taken must be finite
    far = emit.binary("max", size, _BOUND, _KIND)
    share = emit.binary("div", near, _BOUND, _KIND)
    low = polynomial(emit, emit.binary("mul", share, share, _KIND), _I1_BELOW if order else _I0_BELOW)
    if order:
        low = emit.binary("mul", low, near, _KIND)
    high = polynomial(emit, emit.binary("div", _BOUND, far, _KIND), _I1_ABOVE if order else _I0_ABOVE)
    high = emit.binary("div", high, emit.unary("sqrt", far), _KIND)
    if scaled:
        low = emit.binary("mul", low, emit.unary("exp", emit.unary("neg", near)), _KIND)
    else:
        high = emit.binary("mul", high, emit.unary("exp", far), _KIND)
    value = emit.select(emit.binary("gt", _BOUND, size, _KIND, torch.bool), low, high, _KIND)
    if order:
        value = emit.select(compare(emit, "lt", x, 0), emit.unary("neg", value), value, _KIND)
    return emit.cast(value, emit.dtype)


@_emits(_aten.special_erfcx.default)
def erfcx(emit: Emit, given: Value) -> Value:
    """`exp(x * x) * erfc(x)`."""
    x = emit.cast(given, _KIND)
    below = compare(emit, "lt", x, 0)
    scaled = _scaled_complement(emit, emit.unary("abs", x))
    # Only of numbers below 0: the branch that is not taken must be finite.
    low = emit.binary("min", x, 0.0, _KIND)
    grown = emit.binary("mul", emit.unary("exp", emit.binary("mul", low, low, _KIND)), 2.0, _KIND)
    value = emit.select(below, emit.binary("sub", grown, scaled, _KIND), scaled, _KIND)
    return emit.cast(value, emit.dtype)


def _scaled_complement(emit: Emit, size: Value) -> Value:
    """`erfcx` of what is not below 0."""
    part = emit.binary("div", 2.0, emit.binary("add", size, 2.0, _KIND), _KIND)
    return emit.binary("mul", part, emit.unary("exp", polynomial(emit, part, _ERFCX)), _KIND)


@_emits(_aten.special_log_ndtr.default)
def log_ndtr(emit: Emit, given: Value) -> Value:
    """Logarithm of the probability that a normal number is below x."""
    x = emit.cast(given, _KIND)
    scaled = _scaled_complement(emit, emit.binary("div", emit.unary("abs", x), math.sqrt(2), _KIND))
    square = emit.binary("mul", emit.binary("mul", x, x, _KIND), 0.5, _KIND)
    half = emit.binary("mul", scaled, 0.5, _KIND)
    below = emit.binary("sub", emit.unary("log", half), square, _KIND)
    share = emit.binary("mul", half, emit.unary("exp", emit.unary("neg", square)), _KIND)
    above = emit.unary("log", emit.binary("sub", 1.0, share, _KIND))
    # Far above 0 what is missing to 1 is lost in the difference.
    above = emit.select(compare(emit, "lt", share, 1e-3), _near_one(emit, share), above, _KIND)
    return emit.cast(emit.select(compare(emit, "lt", x, 0), below, above, _KIND), emit.dtype)


def _near_one(emit: Emit, share: Value) -> Value:
    """`log(1 - share)` of a small one, by its series."""
    return emit.binary("mul", polynomial(emit, share, (-1 / 3, -1 / 2, -1.0)), share, _KIND)
