"""Numbers that a module calculates in floats from lengths: `x.shape[0] ** -0.5`, `x.shape[1] / 3 - 1`."""

from collections.abc import Callable
from functools import reduce
from typing import Final

import sympy
import torch

from t2n_hf.errors import EmitError
from t2n_hf.ops.builder import Builder
from t2n_hf.ops.dims import length_of
from t2n_hf.ops.value import Operand, Value

__all__ = ["calculated"]

_PYTHON: Final = torch.float64  # floats of Python are


def calculated(builder: Builder, expression: sympy.Expr) -> Value:
    """A number as torch writes it, over named symbols, as a tensor of rank 0 in f64.

    Raises EmitError for a function that has no form here.
    """
    return builder.tensor(_operand(builder, expression), _PYTHON)


def _operand(builder: Builder, part: sympy.Expr) -> Operand:
    if part.is_number:
        return int(part) if part.is_Integer else float(part)
    rule = _RULES.get(type(part).__name__)
    if rule is not None:
        return rule(builder, *(_operand(builder, argument) for argument in part.args))
    if part.is_integer:
        return builder.full((), length_of(part, {symbol: symbol for symbol in part.free_symbols}), _PYTHON)
    raise EmitError(f"{builder.site}: it is given {part}, and {type(part).__name__} of a length has no form in tract")


def _all(op: str) -> Callable[..., Operand]:
    def rule(builder: Builder, *parts: Operand) -> Operand:
        return reduce(lambda left, right: builder.binary(op, left, right, _PYTHON), parts)

    return rule


def _power(builder: Builder, base: Operand, exponent: Operand) -> Operand:
    if exponent == -1:
        return builder.binary("div", 1, base, _PYTHON)
    return builder.binary("pow", base, exponent, _PYTHON)


def _root(builder: Builder, part: Operand) -> Operand:
    return builder.unary("sqrt", builder.tensor(part, _PYTHON))


def _same(_builder: Builder, part: Operand) -> Operand:
    return part


# By class name: torch brings its own functions, and plain sums and products of what is no integer.
_RULES: Final[dict[str, Callable[..., Operand]]] = {
    "Add": _all("add"),
    "FloatPow": _power,
    "FloatTrueDiv": _all("div"),
    "Identity": _same,
    "IntTrueDiv": _all("div"),
    "Max": _all("max"),
    "Min": _all("min"),
    "Mul": _all("mul"),
    "OpaqueUnaryFn_sqrt": _root,
    "Pow": _power,
    "ToFloat": _same,
}
