"""torch.export with named lengths, and the proof by trial that the graph holds at all of them.

A graph holds where the conditions hold that the capture relied on ("the length is not 1", "S + P is at most 128").
torch.export proves them for a named `Dim` one length at a time: it overlooks conditions between two lengths, and gives
up on divisions ("L must be 20 * L'"). Where it gives up the lengths are captured as free ones; in any case the
conditions are tried at many lengths of the range, and one that fails refuses the capture.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from t2n_hf.errors import CaptureError

__all__ = ["export_with_lengths"]

# Each length is tried on its own up to this far from its least value, then at a few large ones; all together at a few.
_SWEEP: Final = 130
_LARGE: Final = (255, 256, 257, 1000, 4095, 4099, 16000, 65537)
_FEW: Final = 3
_RELATION: Final = re.compile(r"\s*([\w+*/ -]+?)\s*(<=|>=|==|<|>)\s*([\w+*/ -]+?)\s*")
_COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


def export_with_lengths(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    dims: Sequence[Mapping[int, Any]],
    asserts: Sequence[str] = (),
    undo: Callable[[], None] = lambda: None,
) -> ExportedProgram:
    """Export `module(tensors)`.

    `dims` has the free axes of each tensor, as `torch.export` takes them; `asserts` are facts that hold for any call
    ("S+P < 129"), over the names of the Dims. `undo` is called between two runs of the module: what the first one set
    in it would decide for the second one, and leave its condition out. Raises what torch.export raises, and
    CaptureError when the graph would not hold at lengths that the Dims and the facts allow.
    """
    try:
        exported = torch.export.export(module, (tensors,), dynamic_shapes=(list(dims),), strict=False)
    except (UserError, AssertionError) as refusal:  # its solver ends in an assertion for some divisions
        unproven = getattr(refusal, "error_type", None) in (None, UserErrorType.CONSTRAINT_VIOLATION)
        if not unproven or not _names(dims):
            raise
        undo()
        free = [{axis: _freed(dim) for axis, dim in entry.items()} for entry in dims]
        try:
            exported = torch.export.export(module, (tensors,), dynamic_shapes=(free,), strict=False)
        except Exception:  # noqa: BLE001 - the first refusal says more: which length is fixed, and to what
            raise refusal from None
    _refuse_broken(exported, dims, [tuple(tensor.shape) for tensor in tensors], asserts)
    return exported


def _names(dims: Sequence[Mapping[int, Any]]) -> dict[str, Any]:
    return {dim.__name__: dim for entry in dims for dim in entry.values() if isinstance(dim, Dim)}


def _freed(dim: object) -> Any:  # noqa: ANN401 - what torch.export takes
    if not isinstance(dim, Dim):
        return dim
    if getattr(dim, "root", dim) is not dim:
        return Dim.DYNAMIC  # derived from another one: 2 * L
    low, high = _range_of(dim)
    return Dim.DYNAMIC(min=max(2, low), max=high)


def _range_of(dim: Any) -> tuple[int, int | None]:  # noqa: ANN401 - Dim has no annotations
    high = dim.max
    return int(dim.min), int(high) if isinstance(high, int) and high < 1 << 31 else None


def _refuse_broken(
    exported: ExportedProgram,
    dims: Sequence[Mapping[int, Any]],
    shapes: Sequence[tuple[int, ...]],
    asserts: Sequence[str],
) -> None:
    """Raise CaptureError for the first condition of the capture that fails at lengths in range."""
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"][-len(shapes) :]
    environment = _environment(values)
    if environment is None:
        return
    length_of: dict[sympy.Symbol, sympy.Symbol] = {}
    example: dict[str, int] = {}
    for value, entry, shape in zip(values, dims, shapes, strict=True):
        for axis, dim in entry.items():
            size = value.shape[axis]
            if isinstance(dim, Dim) and getattr(dim, "root", dim) is dim and isinstance(size, torch.SymInt):
                length_of.setdefault(size.node._expr, sympy.Symbol(dim.__name__, integer=True))
                example[dim.__name__] = shape[axis]
    ranges = {name: _range_of(dim) for name, dim in _names(dims).items()}
    facts = [fact for fact in map(_fact, asserts) if fact is not None]
    for condition in _conditions(environment, length_of):
        used = sorted(str(symbol) for symbol in condition.free_symbols)
        if set(used) <= set(example):  # else it is about a length that is no input's
            _try(condition, {name: ranges[name] for name in used}, example, facts)


def _try(
    condition: sympy.Basic,
    ranges: Mapping[str, tuple[int, int | None]],
    example: Mapping[str, int],
    facts: Sequence[Callable[[Mapping[str, int]], bool]],
) -> None:
    allowed = [lengths for lengths in _tried(ranges, example) if all(fact({**example, **lengths}) for fact in facts)]
    broken = next((lengths for lengths in allowed if not _holds(condition, lengths)), None)
    if broken is not None and not _excludes_the_most(condition, allowed):
        raise CaptureError(_broken(condition, broken, example))


def _excludes_the_most(condition: sympy.Basic, allowed: Sequence[Mapping[str, int]]) -> bool:
    """Whether all that a condition asks is that a length is not the most that it can be.

    torch asks that of the end of a slice of a table that is made for the longest context. A slice of all rows is one.
    """
    if not (isinstance(condition, sympy.Ne) and condition.rhs.is_Integer):
        return False
    return all(_at(condition.lhs, lengths) <= int(condition.rhs) for lengths in allowed)


def _holds(condition: sympy.Basic, lengths: Mapping[str, int]) -> bool:
    values = {sympy.Symbol(name, integer=True): length for name, length in lengths.items()}
    return bool(sympy_interp(PythonReferenceAnalysis, values, condition))


def _fact(line: str) -> Callable[[Mapping[str, int]], bool] | None:
    """A line such as "S+P < 129" as a function of the lengths; None for one that holds in some calls only."""
    found = _RELATION.fullmatch(line)
    if found is None:
        return None
    left, right = (_expression(side) for side in (found[1], found[3]))
    compare = _COMPARISONS[found[2]]

    names = {str(symbol) for symbol in left.free_symbols | right.free_symbols}

    def holds(lengths: Mapping[str, int]) -> bool:
        return not names <= set(lengths) or compare(_at(left, lengths), _at(right, lengths))

    return holds


def _at(expression: sympy.Expr, lengths: Mapping[str, int]) -> int:
    """The value at these lengths. Sums and products are most of what there is, and sympy is slow at substituting."""
    if expression.is_Symbol:
        return lengths[str(expression)]
    if expression.is_Integer:
        return int(expression)
    if expression.is_Add:
        return sum(_at(part, lengths) for part in expression.args)
    if expression.is_Mul and all(part.is_integer for part in expression.args):
        return math.prod(_at(part, lengths) for part in expression.args)
    return int(expression.subs({symbol: lengths[str(symbol)] for symbol in expression.free_symbols}))


def _environment(values: Sequence[Any]) -> Any:  # noqa: ANN401 - torch's ShapeEnv
    sizes = (size for value in values for size in value.shape if isinstance(size, torch.SymInt))
    first = next(sizes, None)
    return None if first is None else first.node.shape_env


def _conditions(environment: Any, length_of: Mapping[sympy.Symbol, sympy.Symbol]) -> list[Any]:  # noqa: ANN401
    """What the capture relied on, in the names of the lengths."""
    known: dict[Any, Any] = {}
    for guard in environment.guards:
        expression = environment.simplify(guard.expr).xreplace(dict(length_of))
        # torch takes a length of 1 for one like any other when it is said to be free, and so do we: also one that is
        # computed from an input's ("the number of windows is not 1").
        if expression not in (sympy.true, True) and not _excludes_one(expression):
            known.setdefault(expression, None)
    return list(known)


def _excludes_one(condition: Any) -> bool:  # noqa: ANN401
    return isinstance(condition, sympy.Ne) and sympy.Integer(1) in condition.args


def _tried(ranges: Mapping[str, tuple[int, int | None]], example: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Lengths in range: each one on its own while the others are as in the example, then all together."""
    lows = {name: max(2, low) for name, (low, _) in ranges.items()}
    single = {name: _values(lows[name], high) for name, (_, high) in ranges.items()}
    for name, values in single.items():
        for value in values:
            yield {**{other: example[other] for other in ranges}, name: value}
    if len(ranges) > 1:
        few = {name: sorted({*values[:_FEW], *values[-_FEW:]}) for name, values in single.items()}
        for together in itertools.islice(itertools.product(*few.values()), _SWEEP):
            yield dict(zip(few, together, strict=True))


def _values(low: int, high: int | None) -> list[int]:
    values = [*range(low, low + _SWEEP), *_LARGE, *(() if high is None else (high,))]
    return sorted({value for value in values if value >= low and (high is None or value <= high)})


def _broken(condition: Any, lengths: Mapping[str, int], example: Mapping[str, int]) -> str:  # noqa: ANN401
    at = ", ".join(f"{name}={value}" for name, value in lengths.items())
    traced = ", ".join(f"{name}={example[name]}" for name in lengths)
    return (
        f"the graph captured at {traced} does not hold at {at}: there `{condition}` is false, and the module takes "
        "another way. Give the Dim a range (min, max) within which it takes one way (max_context for a model of text), "
        "or capture at another length"
    )


def _expression(text: str) -> sympy.Expr:
    """Names are symbols, also those that sympy has other uses for (S, N, E)."""
    names = {name: sympy.Symbol(name, integer=True) for name in re.findall(r"[A-Za-z_]\w*", text)}
    return sympy.sympify(text, locals=names)
