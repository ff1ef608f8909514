"""Lengths: plain integers, or sympy expressions of the archive's symbols, and their text in tract's syntax."""

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from t2n_hf.errors import EmitError
from t2n_hf.nnef.ir import Dim

__all__ = [
    "Length",
    "Shape",
    "added_axes",
    "broadcast_lengths",
    "broadcast_shapes",
    "dim",
    "dims",
    "is_fixed",
    "is_lost",
    "length_of",
    "product",
    "same",
    "without_lost_halves",
]

Length: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Length, ...]
# Factors in these parts are exact in floats, whatever they are multiplied by.
_EXACT_PARTS: Final = 1024
_OF_FLOATS: Final = frozenset({"IntTrueDiv", "ToFloat"})
_ROUNDINGS: Final = frozenset({"CeilToInt", "FloorToInt", "RoundToInt", "TruncToInt"})


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
    named = _without_floats(expression.xreplace(names)).replace(_is_by_length, _divided)
    return int(named) if named.is_Integer else sympy.expand(named)


def _is_by_length(part: sympy.Expr) -> bool:
    return type(part).__name__ == "FloorDiv" and part.args[1].is_Symbol and part.args[0].is_polynomial()


def _divided(part: sympy.Expr) -> sympy.Expr:
    """`(N*S + S - 1) // S` as `N`: tract finds no quotient of a multiple of a length (1 or more), or of 1 less."""
    whole, length = part.args
    quotient, rest = sympy.div(whole, length, length)
    factors = sympy.Poly(quotient, length, *whole.free_symbols - {length}).coeffs()
    return quotient + rest if all(factor.is_Integer for factor in factors) and rest in (0, -1) else part


def _without_floats(expression: sympy.Expr) -> sympy.Expr:
    """A length that was calculated in floats, in exact numbers: `TruncToInt(2.0 * ToFloat(S))` is `2 * S`."""
    if not any(part.is_Float or type(part).__name__ in _OF_FLOATS for part in sympy.preorder_traversal(expression)):
        return expression
    exact = expression.replace(lambda part: part.is_Float, lambda number: _exact(number, expression))
    exact = exact.replace(lambda part: type(part).__name__ == "ToFloat", lambda part: part.args[0])
    exact = exact.replace(lambda part: type(part).__name__ in _ROUNDINGS, lambda part: _exact_quotients(part))
    return exact.replace(_is_whole_part, lambda part: sympy.expand(part.args[0]))


def _exact_quotients(rounded: sympy.Expr) -> sympy.Expr:
    """What is rounded with its quotients as fractions. A float that holds one is exact, or rounds as that does.

    What is calculated with a float that does not may round to another whole number than the fraction.
    """
    (inner,) = rounded.args
    quotients = [part for part in sympy.preorder_traversal(inner) if type(part).__name__ == "IntTrueDiv"]
    alone = inner.as_coeff_Mul()[1] in quotients and _is_power_of_two(inner.as_coeff_Mul()[0])
    for quotient in quotients:
        if not alone and not _is_power_of_two(quotient.args[1]):
            raise EmitError(
                f"length {rounded} is rounded from more than a quotient by {quotient.args[1]}, which floats do not "
                "hold, and tract calculates lengths in whole numbers; use // in its place"
            )
    return rounded.func(inner.replace(lambda part: part in quotients, lambda part: part.args[0] / part.args[1]))


def _is_power_of_two(number: sympy.Expr) -> bool:
    parts = sympy.fraction(number)
    return all(part.is_Integer and part > 0 and int(part).bit_count() == 1 for part in parts)


def _exact(number: sympy.Float, expression: sympy.Expr) -> sympy.Rational:
    exact = sympy.Rational(number)
    if exact.q > _EXACT_PARTS:
        raise EmitError(
            f"length {expression} is rounded from a product with {float(number)}, and tract calculates lengths in "
            "whole numbers; give the size, or a factor such as 2, 0.5 or 1.25"
        )
    return exact


def _is_whole_part(part: sympy.Expr) -> bool:
    """Whether this takes the whole part of what is whole: an integer sum of products of symbols."""
    if type(part).__name__ not in _ROUNDINGS:
        return False
    return sympy.fraction(sympy.together(part.args[0]))[1] == 1


def dim(length: Length) -> int | Dim:
    """A length as an argument of the graph model."""
    if isinstance(length, int):
        return length
    expression = sympy.expand(length)
    return int(expression) if expression.is_Integer else Dim(_text(expression))


def dims(shape: Iterable[Length]) -> list[int | Dim]:
    """A shape as an argument of the graph model."""
    return [dim(length) for length in shape]


def is_fixed(shape: Shape) -> bool:
    """Whether all lengths are numbers."""
    return all(isinstance(length, int) for length in shape)


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
    if expression != (whole := without_lost_halves(expression)):
        return _text(whole)
    terms = [term for term in sympy.Add.make_args(expression) if not term.is_Integer]
    terms += [term for term in sympy.Add.make_args(expression) if term.is_Integer]
    added = [_text(term) for term in terms if not term.could_extract_minus_sign()]
    taken = [_in_brackets(_text(-term)) for term in terms if term.could_extract_minus_sign()]
    return "-".join(["+".join(added) or "0", *taken])


def _in_brackets(text: str) -> str:
    """The text of a term that is taken away: one that is a sum itself is taken as a whole."""
    level, found = 0, False
    for character in text:
        level += (character == "(") - (character == ")")
        found = found or (level == 0 and character in "+-")
    return f"({text})" if found else text


def without_lost_halves(length: sympy.Basic) -> sympy.Basic:
    """The same length, where tract would calculate another one.

    It makes X/2 of `X - X/2`, and so loses 1 when X is odd; what is meant is `(X+1)/2`. The same for multiples of both.
    """
    length = sympy.expand(length.replace(_is_odd_part, lambda part: part.args[0] - 2 * FloorDiv(part.args[0], 2)))
    for term in sympy.Add.make_args(length):
        for half in sympy.Mul.make_args(term):
            whole = _whole_of(half)
            times = -term / half
            if whole is None or times.could_extract_minus_sign():
                continue
            others = length - term
            rest = sympy.expand(others - times * whole)
            if _terms(rest) < _terms(others):
                return without_lost_halves(rest + times * FloorDiv(whole + 1, 2))
    return length


def is_lost(begin: Length, end: Length) -> bool:
    """Whether tract would calculate `end - begin` wrongly."""
    first, last = (without_lost_halves(sympy.sympify(place)) for place in (begin, end))
    distance = sympy.expand(last - first)
    return bool(distance != without_lost_halves(distance))


def _is_odd_part(part: sympy.Basic) -> bool:
    return type(part).__name__ in {"Mod", "PythonMod"} and part.args[1] == 2 and not _is_negative(part.args[0])


def _whole_of(half: sympy.Basic) -> sympy.Expr | None:
    """The X of a half that is rounded down, X/2."""
    if type(half).__name__ == "FloorDiv":
        whole, parts = half.args
    elif type(half).__name__ in {"floor", "FloorToInt", "TruncToInt"}:
        whole, parts = sympy.fraction(sympy.together(half.args[0]))
    else:
        return None
    return whole if parts == 2 else None


def _terms(length: sympy.Basic) -> int:
    return 0 if length == 0 else len(sympy.Add.make_args(length))


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
    left, right = expression.args
    return _floored(left, right)


def _floored(left: sympy.Expr, right: sympy.Expr) -> str:
    """`left / right` rounded down. tract rounds towards 0, so it must not be asked for quotients of less than 0."""
    if right == 1:
        return _text(left)
    return f"0-({_raised(-left, right)})" if _is_negative(left) else f"{_atom(left)}/{_atom(right)}"


def _raised(left: sympy.Expr, right: sympy.Expr) -> str:
    """`left / right` rounded up."""
    if right == 1:
        return _text(left)
    return f"0-({_floored(-left, right)})" if _is_negative(left) else f"({_text(left + right - 1)})/{_atom(right)}"


def _is_negative(expression: sympy.Expr) -> bool:
    """Whether all that is not a number in it is taken away: symbols are lengths."""
    terms = [term for term in sympy.Add.make_args(sympy.expand(expression)) if not term.is_number]
    return bool(terms) and all(term.could_extract_minus_sign() for term in terms)


def _remainder(expression: sympy.Basic) -> str:
    left, right = expression.args
    if _is_negative(left):  # as Python has it, what is missing to the next multiple
        return f"({_raised(-left, right)})*{_atom(right)}-{_atom(-left)}"
    return f"{_atom(left)}-({_atom(left)}/{_atom(right)})*{_atom(right)}"


def _ceiling(expression: sympy.Basic) -> str:
    left, right = expression.args
    return _raised(left, right)


def _whole_part(expression: sympy.Basic) -> str:
    return _floored(*sympy.fraction(sympy.together(expression.args[0])))


def _whole_part_above(expression: sympy.Basic) -> str:
    return _raised(*sympy.fraction(sympy.together(expression.args[0])))


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
    "CeilToInt": _whole_part_above,
    "CeilDiv": _ceiling,
    "CleanDiv": _quotient,
    "FloorDiv": _quotient,
    "FloorToInt": _whole_part,
    "Identity": _inner,
    "IntTrueDiv": _quotient,
    "Max": _call("max"),
    "Min": _call("min"),
    "Mod": _remainder,
    "Mul": _product,
    "Pow": _power,
    "PowByNatural": _power,
    "PythonMod": _remainder,
    "TruncToInt": _whole_part,
    "ceiling": _whole_part_above,
    "floor": _whole_part,
}


def added_axes(small: Shape, large: Shape) -> list[int] | None:
    """Axes of length 1 whose removal from `large` leaves `small`; None when there are none such."""
    axes: list[int] = []
    place = 0
    for axis, length in enumerate(large):
        if place < len(small) and same(length, small[place]):
            place += 1
        elif same(length, 1):
            axes.append(axis)
        else:
            return None
    return axes if place == len(small) else None
