"""Functions of one number, element by element."""

import math
from typing import Any, Final

import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["log_one_plus"]

_aten = torch.ops.aten
_emits = EMITTERS.emits

# Defined on floats only: torch gives a float for an integer, so the argument is cast.
_FLOAT_FUNCTIONS: Final = {
    "acos": (_aten.acos.default,),
    "acosh": (_aten.acosh.default,),
    "asin": (_aten.asin.default,),
    "asinh": (_aten.asinh.default,),
    "atan": (_aten.atan.default,),
    "atanh": (_aten.atanh.default,),
    "cos": (_aten.cos.default, _aten.cos_.default),
    "cosh": (_aten.cosh.default,),
    "exp": (_aten.exp.default, _aten.exp_.default),
    "log": (_aten.log.default, _aten.log_.default),
    "recip": (_aten.reciprocal.default, _aten.reciprocal_.default),
    "rsqrt": (_aten.rsqrt.default, _aten.rsqrt_.default),
    "sigmoid": (_aten.sigmoid.default, _aten.sigmoid_.default),
    "sin": (_aten.sin.default, _aten.sin_.default),
    "sinh": (_aten.sinh.default,),
    "sqrt": (_aten.sqrt.default, _aten.sqrt_.default),
    "tan": (_aten.tan.default,),
    "tanh": (_aten.tanh.default, _aten.tanh_.default),
    "tract_core_erf": (_aten.erf.default, _aten.erf_.default),
}
# Integers stay what they are.
_ROUNDINGS: Final = {
    "ceil": (_aten.ceil.default, _aten.ceil_.default),
    "floor": (_aten.floor.default, _aten.floor_.default),
    "tract_core_round_even": (_aten.round.default, _aten.round_.default),
}
_NUMBER_FUNCTIONS: Final = {
    "abs": (_aten.abs.default, _aten.abs_.default),
    "neg": (_aten.neg.default, _aten.neg_.default),
    "sign": (_aten.sign.default, _aten.sgn.default),
}


def _register() -> None:
    for table, make in (
        (_FLOAT_FUNCTIONS, _float_function),
        (_ROUNDINGS, _rounding),
        (_NUMBER_FUNCTIONS, _number_function),
    ):
        for op, overloads in table.items():
            _emits(*overloads)(make(op))


def _float_function(op: str) -> Any:  # noqa: ANN401 - an emitter
    def emitter(emit: Emit, x: Value) -> Value:
        return emit.unary(op, emit.cast(x, emit.dtype))

    return emitter


def _rounding(op: str) -> Any:  # noqa: ANN401 - an emitter
    def emitter(emit: Emit, x: Value) -> Value:
        if not x.dtype.is_floating_point:
            return x
        if op == "tract_core_round_even" and x.dtype is torch.float64:
            return _rounded_even(emit, x)
        return emit.unary(op, x)

    return emitter


def _rounded_even(emit: Emit, x: Value) -> Value:
    """`x` rounded, halves to even, of f64, for which tract's operator has no form."""
    half = emit.binary("mul", emit.unary("floor", emit.binary("mul", x, 0.5, x.dtype)), 2, x.dtype)  # even, below x
    above = emit.binary("sub", x, half, x.dtype)  # from 0 to 2
    step = emit.select(emit.binary("gt", above, 0.5, x.dtype, torch.bool), 1, 0, x.dtype)
    far = emit.binary("tract_core_bitor", compare(emit, "gt", above, 1.5), compare(emit, "eq", above, 1.5), torch.bool)
    return emit.binary("add", half, emit.select(far, 2, step, x.dtype), x.dtype)


def _number_function(op: str) -> Any:  # noqa: ANN401 - an emitter
    def emitter(emit: Emit, x: Value) -> Value:
        if x.dtype is torch.bool:
            return x
        if op == "sign" and not x.dtype.is_floating_point:  # tract has it of integers since 0.23.5
            return emit.cast(emit.unary(op, emit.cast(x, torch.float32)), x.dtype)
        return emit.unary(op, x)

    return emitter


_register()


@_emits(_aten.log2.default)
def log2(emit: Emit, x: Value) -> Value:
    """Logarithm to base 2."""
    return emit.binary("mul", emit.unary("log", emit.cast(x, emit.dtype)), 1 / math.log(2), emit.dtype)


@_emits(_aten.log10.default)
def log10(emit: Emit, x: Value) -> Value:
    """Logarithm to base 10."""
    return emit.binary("mul", emit.unary("log", emit.cast(x, emit.dtype)), 1 / math.log(10), emit.dtype)


@_emits(_aten.log1p.default)
def log1p(emit: Emit, x: Value) -> Value:
    """Logarithm of 1 + x."""
    x = emit.cast(x, emit.dtype)
    large = emit.binary("gt", x, 1, x.dtype, torch.bool)
    return emit.select(large, emit.unary("log", emit.binary("add", x, 1, x.dtype)), log_one_plus(emit, x), x.dtype)


def log_one_plus(emit: Emit, x: Value) -> Value:
    """log(1 + x) of floats from -1 to 1, as exact as `log` is: what 1 + x loses of x is made up for by a factor."""
    above = emit.binary("add", x, 1, x.dtype)
    kept = emit.binary("sub", above, 1, x.dtype)
    factor = emit.binary("div", emit.unary("log", above), kept, x.dtype)
    lost = emit.binary("eq", kept, 0, x.dtype, torch.bool)
    return emit.select(lost, x, emit.binary("mul", x, factor, x.dtype), x.dtype)


@_emits(_aten.expm1.default)
def expm1(emit: Emit, x: Value) -> Value:
    """exp(x) - 1; near 0 by its series."""
    x = emit.cast(x, emit.dtype)
    far = emit.binary("sub", emit.unary("exp", x), 1, x.dtype)
    near = emit.binary("mul", x, emit.binary("add", 1, emit.binary("mul", x, 0.5, x.dtype), x.dtype), x.dtype)
    small = emit.binary("gt", 1e-3, emit.unary("abs", x), x.dtype, torch.bool)
    return emit.select(small, near, far, x.dtype)


@_emits(_aten.exp2.default)
def exp2(emit: Emit, x: Value) -> Value:
    """2 ** x."""
    return emit.unary("exp", emit.binary("mul", x, math.log(2), emit.dtype))


@_emits(_aten.erfc.default)
def erfc(emit: Emit, x: Value) -> Value:
    """1 - erf(x)."""
    return emit.binary("sub", 1, emit.unary("tract_core_erf", emit.cast(x, emit.dtype)), emit.dtype)


@_emits(_aten.trunc.default, _aten.fix.default)
def trunc(emit: Emit, x: Value) -> Value:
    """`x` rounded towards zero."""
    if not x.dtype.is_floating_point:
        return x
    return emit.binary("mul", emit.unary("floor", emit.unary("abs", x)), emit.unary("sign", x), x.dtype)


@_emits(_aten.frac.default)
def frac(emit: Emit, x: Value) -> Value:
    """`x` without its whole part."""
    return emit.binary("sub", x, trunc(emit, x), x.dtype)
