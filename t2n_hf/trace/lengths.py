"""torch.export with named lengths, also where its own solver cannot tell that they may be what they are said to be.

For a named `Dim` torch.export demands a proof that every length of its range takes the same branches as the example,
and gives up on divisions ("L must be 20 * L'"). Then the lengths are captured as free ones, and the conditions that
the capture relied on are tried at many lengths of the range instead: one that fails refuses the capture.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch.export import Dim, ExportedProgram

from t2n_hf.errors import CaptureError

__all__ = ["export_with_lengths"]

# Each length is tried on its own up to this far from its least value, then at a few large values; pairs at a few.
_SWEEP: Final = 130
_LARGE: Final = (255, 256, 257, 1000, 4095, 4099, 16000, 65537)
_PAIRED: Final = 6


def export_with_lengths(
    module: torch.nn.Module, tensors: list[torch.Tensor], dims: Sequence[Mapping[int, Any]]
) -> ExportedProgram:
    """Export `module(tensors)`; `dims` has the free axes of each tensor, as `torch.export` takes them.

    Raises what torch.export raises, and CaptureError when the graph would not hold at a length in the range of a Dim.
    """
    try:
        return torch.export.export(module, (tensors,), dynamic_shapes=(list(dims),), strict=False)
    except UserError as refusal:
        if refusal.error_type is not UserErrorType.CONSTRAINT_VIOLATION or not _names(dims):
            raise
        free = [{axis: _freed(dim) for axis, dim in entry.items()} for entry in dims]
        try:
            exported = torch.export.export(module, (tensors,), dynamic_shapes=(free,), strict=False)
        except Exception:  # noqa: BLE001 - the first refusal says more: which length is fixed, and to what
            raise refusal from None
        _refuse_broken(exported, dims, [tuple(tensor.shape) for tensor in tensors])
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
    exported: ExportedProgram, dims: Sequence[Mapping[int, Any]], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise CaptureError for the first condition of the capture that fails at a length in range."""
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"][-len(shapes) :]
    length_of: dict[sympy.Symbol, sympy.Expr] = {}
    example: dict[str, int] = {}
    for value, entry, shape in zip(values, dims, shapes, strict=True):
        for axis, dim in entry.items():
            size = value.shape[axis]
            if not isinstance(dim, Dim) or not isinstance(size, torch.SymInt) or getattr(dim, "root", dim) is not dim:
                continue
            length_of.setdefault(size.node._expr, sympy.Symbol(dim.__name__, integer=True))
            example[dim.__name__] = shape[axis]
    environment = _environment(values)
    if environment is None:
        return
    names = _names(dims)
    for condition in _conditions(environment, length_of):
        used = sorted(str(symbol) for symbol in condition.free_symbols)
        if not set(used) <= set(example):
            continue  # a length that is not an input
        for lengths in _tried({name: _range_of(names[name]) for name in used}, example):
            held = condition.subs({sympy.Symbol(name, integer=True): value for name, value in lengths.items()})
            if held != sympy.true:
                raise CaptureError(_broken(condition, lengths, example))


def _environment(values: Sequence[Any]) -> Any:  # noqa: ANN401 - torch's ShapeEnv
    sizes = (size for value in values for size in value.shape if isinstance(size, torch.SymInt))
    first = next(sizes, None)
    return None if first is None else first.node.shape_env


def _conditions(environment: Any, length_of: Mapping[sympy.Symbol, sympy.Symbol]) -> list[Any]:  # noqa: ANN401
    """What the capture relied on, in the names of the lengths."""
    known: dict[Any, Any] = {}
    for guard in environment.guards:
        expression = environment.simplify(guard.expr).xreplace(dict(length_of))
        if expression not in (sympy.true, True):
            known.setdefault(expression, None)
    return list(known)


def _tried(ranges: Mapping[str, tuple[int, int | None]], example: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Lengths in range: each one on its own while the others are as in the example, then all together."""
    # torch takes a length of 1 for one like others when it is said to be free; so is it here.
    lows = {name: max(2, low) for name, (low, _) in ranges.items()}
    single = {name: _values(lows[name], high) for name, (_, high) in ranges.items()}
    for name, values in single.items():
        for value in values:
            yield {**{other: example[other] for other in ranges}, name: value}
    if len(ranges) > 1:
        few = {name: [*values[:3], *values[-3:]][:_PAIRED] for name, values in single.items()}
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
        "another way. Give the Dim a range (min, max) within which it takes one way, or capture at another length"
    )
