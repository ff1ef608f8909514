"""What is known of an axis up to each place: sums, products, extremes."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from t2n_hf.nnef.versions import since
from t2n_hf.ops.builder import Builder
from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.scan import scan
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_Step: TypeAlias = Callable[[Builder, Value, list[Value]], list[Value]]


@_emits(_aten.cumsum.default, _aten.cumsum_.default)
def cumsum(emit: Emit, x: Value, dim: int, **_: object) -> Value:
    """Sum of an axis up to each place."""
    x = emit.cast(x, emit.dtype)
    if x.rank == 0:
        return x
    x, axis = emit.wide(x), axis_of(dim, x.rank)
    if emit.options.reaches(since("tract_core_cumsum")):
        sums = emit.unary("tract_core_cumsum", x, axis=axis, exclusive=False, reverse=False)
        return emit.cast(sums, emit.dtype)
    zeros = emit.full(tuple(_without(x, axis)), 0, x.dtype)

    def step(body: Builder, given: Value, states: list[Value]) -> list[Value]:
        return [body.binary("add", states[0], given, x.dtype)]

    return emit.cast(_scanned(emit, "cumsum", step, x, axis, starts=[zeros])[0], emit.dtype)


def _scanned(
    emit: Emit, name: str, step: _Step, x: Value, axis: int, *, starts: list[Value], results: int = 1
) -> list[Value]:
    """The first `results` states of a scan along an axis, after each of its elements.

    `step(body, element, states)` gives the next states; `starts` are those before the first element.
    """

    def body(
        builder: Builder, given: list[Value], states: list[Value], _shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        states = step(builder, given[0], states)
        return states, states[:results]

    order = [axis, *(other for other in range(x.rank) if other != axis)]
    states = {f"state{number}": start for number, start in enumerate(starts)}
    result = scan(emit, name, body, elements={"x": emit.transpose(x, order)}, states=states)
    back = [*range(1, axis + 1), 0, *range(axis + 1, x.rank)]
    return [emit.transpose(output, back) for output in result.outputs]


def _without(x: Value, axis: int) -> list[Length]:
    return [length for other, length in enumerate(x.shape) if other != axis]


@_emits(_aten.cumprod.default, _aten.cumprod_.default)
def cumprod(emit: Emit, x: Value, dim: int, **_: object) -> Value:
    """Product of an axis up to each place."""
    x = emit.cast(x, emit.dtype)
    if x.rank == 0:
        return x
    axis = axis_of(dim, x.rank)
    ones = emit.full(tuple(_without(x, axis)), 1, x.dtype)

    def step(body: Builder, given: Value, states: list[Value]) -> list[Value]:
        return [body.binary("mul", states[0], given, x.dtype)]

    return _scanned(emit, "cumprod", step, x, axis, starts=[ones])[0]


@_emits(_aten.logcumsumexp.default)
def logcumsumexp(emit: Emit, x: Value, dim: int) -> Value:
    """Logarithm of the sum of exponentials up to each place."""
    if x.rank == 0:
        return x
    axis = axis_of(dim, x.rank)
    nothing = emit.full(tuple(_without(x, axis)), float("-inf"), x.dtype)

    def step(body: Builder, given: Value, states: list[Value]) -> list[Value]:
        top = body.binary("max", states[0], given, x.dtype)
        # Of nothing and nothing the difference would be NaN.
        base = body.binary("max", top, torch.finfo(x.dtype).min, x.dtype)
        old, new = (body.unary("exp", body.binary("sub", part, base, x.dtype)) for part in (states[0], given))
        return [body.binary("add", body.unary("log", body.binary("add", old, new, x.dtype)), base, x.dtype)]

    return _scanned(emit, "logcumsumexp", step, x, axis, starts=[nothing])[0]


@_emits(_aten.cummax.default)
def cummax(emit: Emit, x: Value, dim: int) -> list[Value]:
    """Greatest element of an axis up to each place, and the last place that has it."""
    return _extremes(emit, "cummax", x, dim)


@_emits(_aten.cummin.default)
def cummin(emit: Emit, x: Value, dim: int) -> list[Value]:
    """Smallest element of an axis up to each place, and the last place that has it."""
    return _extremes(emit, "cummin", x, dim)


def _extremes(emit: Emit, name: str, x: Value, dim: int) -> list[Value]:
    if x.rank == 0:
        return [x, emit.full((), 0, torch.int64)]
    axis, dtype = axis_of(dim, x.rank), x.dtype
    numbers = emit.cast(x, torch.int64) if dtype is torch.bool else x
    first = emit.squeeze(emit.slice(numbers, axis, 0, 1), [axis])
    # The place is counted: of a scanned constant tract takes all elements at each step.
    start = [first, emit.full(tuple(_without(x, axis)), 0, torch.int64), emit.full((), 0, torch.int64)]

    def step(body: Builder, given: Value, states: list[Value]) -> list[Value]:
        better = (given, states[0]) if name == "cummax" else (states[0], given)
        kept = body.binary("gt", *better[::-1], numbers.dtype, torch.bool)
        if dtype.is_floating_point:  # NaN stays
            lost = body.binary("ne", states[0], states[0], dtype, torch.bool)
            kept = body.binary("tract_core_bitor", kept, lost, torch.bool)
        best = body.select(kept, states[0], given, numbers.dtype)
        place = body.select(kept, states[1], states[2], torch.int64)
        return [best, place, body.binary("add", states[2], 1, torch.int64)]

    values, where = _scanned(emit, name, step, numbers, axis, starts=start, results=2)
    return [emit.cast(values, dtype), where]
