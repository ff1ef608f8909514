"""Lengths: plain integers, or sympy expressions of the archive's symbols, and their text in tract's syntax."""

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import sympy
import torch

from t2n_hf.errors import EmitError
from t2n_hf.nnef.ir import Dim

__all__ = ["Length", "Shape", "broadcast_lengths", "broadcast_shapes", "dim", "dims", "length_of", "product", "same"]

Length: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Length, ...]


def length_of(value: Any, names: dict[sympy.Symbol, sympy.Expr]) -> Length:  # noqa: ANN401 - int, SymInt or expression
    """Read a length as torch has it, its symbols replaced by named ones.

    Raises EmitError when a symbol has no name: then the length depends on the values of a tensor.
    """
    expression = value.node.expr if isinstance(value, torch.SymInt) else value
    if not isinstance(expression, sympy.Basic):
        return int(expression)
    if expression.is_Integer:
        return int(expression)
    unknown = sorted(str(symbol) for symbol in expression.free_symbols if symbol not in names)
    if unknown:
        raise EmitError(f"length {expression} depends on the values of a tensor ({', '.join(unknown)})")
    named = expression.xreplace(names)
    return int(named) if named.is_Integer else sympy.expand(named)


def dim(length: Length) -> int | Dim:
    """A length as an argument of the graph model."""
    if isinstance(length, int):
        return length
    expression = sympy.expand(length)
    return int(expression) if expression.is_Integer else Dim(_text(expression))


def dims(shape: Iterable[Length]) -> list[int | Dim]:
    """A shape as an argument of the graph model."""
    return [dim(length) for length in shape]


def same(left: Length, right: Length) -> bool:
    """Whether two lengths are equal whatever the symbols are."""
    return left == right or sympy.expand(left - right) == 0


def product(shape: Iterable[Length]) -> Length:
    """Number of elements."""
    total: Length = 1
    for length in shape:
        total = total * length
    return total


def broadcast_lengths(left: Length, right: Length) -> Length:
    """The length of two aligned axes together."""
    return right if left == 1 else left


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape of several tensors together, aligned on the right as torch does."""
    rank = max(len(shape) for shape in shapes)
    result: list[Length] = [1] * rank
    for shape in shapes:
        for axis, length in enumerate(shape, rank - len(shape)):
            result[axis] = broadcast_lengths(result[axis], length)
    return tuple(result)


def _text(expression: sympy.Basic) -> str:
    if expression.is_Add or (expression.is_number and expression < 0) or _is_negative_product(expression):
        return _sum(expression)
    if expression.is_Symbol or expression.is_Integer:
        return str(expression)
    writer = _WRITERS.get(type(expression).__name__)
    if writer is None:
        raise EmitError(f"length {expression} has no form in tract: it does not know {type(expression).__name__}")
    return writer(expression)


def _is_negative_product(expression: sympy.Basic) -> bool:
    return bool(expression.is_Mul and expression.could_extract_minus_sign())


def _atom(expression: sympy.Basic) -> str:
    text = _text(expression)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _sum(expression: sympy.Basic) -> str:
    """Terms with a plus first: tract reads a minus in front as that of all that follows."""
    terms = [term for term in sympy.Add.make_args(expression) if not term.is_Integer]
    terms += [term for term in sympy.Add.make_args(expression) if term.is_Integer]
    added = [_text(term) for term in terms if not term.could_extract_minus_sign()]
    taken = [_text(-term) for term in terms if term.could_extract_minus_sign()]
    return "-".join(["+".join(added) or "0", *taken])


def _product(expression: sympy.Basic) -> str:
    factors = sympy.Mul.make_args(expression)
    numbers = [factor for factor in factors if factor.is_Rational]
    others = [_atom(factor) for factor in factors if not factor.is_Rational]
    number = sympy.Mul(*numbers)
    if number.is_Integer:
        return "*".join([str(number), *others] if number != 1 else others)
    # sympy divides only where the division is exact.
    top = "*".join([str(number.p), *others] if number.p != 1 else others)
    return f"({top})/{number.q}"


def _power(expression: sympy.Basic) -> str:
    base, exponent = expression.args
    if not (exponent.is_Integer and exponent > 0):
        raise EmitError(f"length {expression} has no form in tract: only whole powers have")
    return "*".join([_atom(base)] * int(exponent))


def _quotient(expression: sympy.Basic) -> str:
    return "/".join(_atom(arg) for arg in expression.args)


def _remainder(expression: sympy.Basic) -> str:
    left, right = (_atom(arg) for arg in expression.args)
    return f"{left}-({left}/{right})*{right}"


def _ceiling(expression: sympy.Basic) -> str:
    left, right = expression.args
    return f"({_text(left)}+{_text(right - 1)})/{_atom(right)}"


def _call(name: str) -> Callable[[sympy.Basic], str]:
    def write(expression: sympy.Basic) -> str:
        first, *others = (_text(arg) for arg in expression.args)
        for other in others:
            first = f"{name}({first},{other})"
        return first

    return write


def _inner(expression: sympy.Basic) -> str:
    return _text(expression.args[0])


# By class name: torch brings its own integer functions.
_WRITERS: Final[dict[str, Callable[[sympy.Basic], str]]] = {
    "CeilToInt": _inner,
    "CeilDiv": _ceiling,
    "CleanDiv": _quotient,
    "FloorDiv": _quotient,
    "Identity": _inner,
    "IntTrueDiv": _quotient,
    "Max": _call("max"),
    "Min": _call("min"),
    "Mod": _remainder,
    "Mul": _product,
    "Pow": _power,
    "PowByNatural": _power,
    "PythonMod": _remainder,
    "TruncToInt": _inner,
}
