"""What comes from literals and counting alone, calculated at one choice of lengths.

A comparison that is true here and false there at these lengths is one of which tract cannot prove what it says of all.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import sympy

from t2n_hf.ops.dims import Length

__all__ = ["counted", "says_both"]

# Elements of what is calculated; what is larger is not known.
_MOST: Final = 1 << 20


def counted(
    op: str, operands: Sequence[Any], options: Mapping[str, Any], shape: Sequence[Length]
) -> np.ndarray[Any, Any] | None:
    """`op(*operands)` of `shape` at these lengths; None when an operand or the operator is not known."""
    rule = _RULES.get(op)
    lengths = [_number(length) for length in shape]
    if rule is None or any(length is None or length < 0 for length in lengths):
        return None
    sizes = [int(length) for length in lengths]  # type: ignore[arg-type]
    given = [_example(operand) for operand in operands]
    if prod(sizes) > _MOST or any(value is None for value in given):
        return None
    try:
        return rule(sizes, options, *given)
    except (ValueError, IndexError):  # lengths that cannot be
        return None


def says_both(value: Any) -> bool:  # noqa: ANN401 - a value
    """Whether a comparison is known to be true here and false there."""
    return value.example is not None and bool(value.example.any()) and not bool(value.example.all())


def _example(operand: Any) -> Any:  # noqa: ANN401 - numbers, expressions, values, and lists of them
    if isinstance(operand, list | tuple):
        parts = [_example(part) for part in operand]
        return None if any(part is None for part in parts) else parts
    if isinstance(operand, bool | int | float | sympy.Expr):
        return _number(operand)
    return getattr(operand, "example", None)


def _number(number: Any) -> float | None:  # noqa: ANN401 - a number, or an expression of lengths
    if not isinstance(number, sympy.Expr):
        return number
    found = number.xreplace({symbol: sympy.Integer(_length(symbol)) for symbol in number.free_symbols})
    if found.is_Integer:
        return int(found)
    return float(found) if found.is_number and found.is_real else None


def _length(symbol: sympy.Basic) -> int:
    """Short, and for most symbols not that of another one."""
    return 5 + sum(map(ord, str(symbol))) % 7


def _cast(_shape: list[int], options: Mapping[str, Any], x: Any) -> Any:  # noqa: ANN401 - arrays
    return np.asarray(x).astype(_KINDS[options["to"][0]])


def _moved(shape: list[int], _options: Mapping[str, Any], x: Any) -> Any:  # noqa: ANN401
    return np.reshape(x, shape)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _shape, _options, *given: function(*given)


_KINDS: Final = {"b": np.bool_, "f": np.float64, "i": np.int64, "u": np.int64}
_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    "add": _plainly(np.add),
    "concat": lambda _shape, options, parts: np.concatenate(parts, options["axis"]),
    "eq": _plainly(np.equal),
    "gt": _plainly(np.greater),
    "mul": _plainly(np.multiply),
    "ne": _plainly(np.not_equal),
    "neg": _plainly(np.negative),
    "reshape": _moved,
    "squeeze": _moved,
    "sub": _plainly(np.subtract),
    "tract_core_broadcast": lambda shape, _options, x: np.broadcast_to(x, shape),
    "tract_core_cast": _cast,
    "tract_core_gather": lambda _shape, options, x, places: np.take(x, places, options["axis"]),
    "tract_core_range": _plainly(np.arange),
    "transpose": lambda _shape, options, x: np.transpose(x, options["axes"]),
    "unsqueeze": _moved,
}
