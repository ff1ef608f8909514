"""What is known of an axis up to each place: sums, products, extremes."""

from collections.abc import Callable
from typing import TypeAlias

import torch

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
_Step: TypeAlias = Callable[[Builder, list[Value], list[Value]], list[Value]]


@_emits(_aten.cumsum.default, _aten.cumsum_.default)
def cumsum(emit: Emit, x: Value, dim: int, **_: object) -> Value:
    """Sum of an axis up to each place."""
    x = emit.cast(x, emit.dtype)
    if x.rank == 0:
        return x
    return emit.unary("tract_core_cumsum", x, axis=axis_of(dim, x.rank), exclusive=False, reverse=False)


def _scanned(emit: Emit, name: str, step: _Step, axis: int, elements: list[Value], starts: list[Value]) -> list[Value]:
    """All states of a scan along an axis of `elements`, from `starts`, which lack that axis.

    `step(body, elements, states)` gives the next states.
    """

    def body(
        builder: Builder, given: list[Value], states: list[Value], _shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        states = step(builder, given, states)
        return states, states

    rank = elements[0].rank
    order = [axis, *(other for other in range(rank) if other != axis)]
    result = scan(
        emit,
        name,
        body,
        elements={f"x{number}": emit.transpose(x, order) for number, x in enumerate(elements)},
        states={f"state{number}": x for number, x in enumerate(starts)},
    )
    back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return [emit.transpose(x, back) for x in result.outputs]


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

    def step(body: Builder, given: list[Value], states: list[Value]) -> list[Value]:
        return [body.binary("mul", states[0], given[0], x.dtype)]

    return _scanned(emit, "cumprod", step, axis, [x], [ones])[0]


@_emits(_aten.logcumsumexp.default)
def logcumsumexp(emit: Emit, x: Value, dim: int) -> Value:
    """Logarithm of the sum of exponentials up to each place."""
    if x.rank == 0:
        return x
    axis = axis_of(dim, x.rank)
    nothing = emit.full(tuple(_without(x, axis)), float("-inf"), x.dtype)

    def step(body: Builder, given: list[Value], states: list[Value]) -> list[Value]:
        top = body.binary("max", states[0], given[0], x.dtype)
        # Of nothing and nothing the difference would be NaN.
        base = body.binary("max", top, torch.finfo(x.dtype).min, x.dtype)
        old, new = (body.unary("exp", body.binary("sub", part, base, x.dtype)) for part in (states[0], given[0]))
        return [body.binary("add", body.unary("log", body.binary("add", old, new, x.dtype)), base, x.dtype)]

    return _scanned(emit, "logcumsumexp", step, axis, [x], [nothing])[0]


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
    places = emit.range(0, x.shape[axis], torch.int64)
    places = emit.unsqueeze(places, [other for other in range(x.rank) if other != axis])
    places = emit.broadcast(places, x.shape)
    first = emit.squeeze(emit.slice(numbers, axis, 0, 1), [axis])
    start = [first, emit.full(tuple(_without(x, axis)), 0, torch.int64)]

    def step(body: Builder, given: list[Value], states: list[Value]) -> list[Value]:
        better = (given[0], states[0]) if name == "cummax" else (states[0], given[0])
        kept = body.binary("gt", *better[::-1], numbers.dtype, torch.bool)
        if dtype.is_floating_point:  # NaN stays
            lost = body.binary("ne", states[0], states[0], dtype, torch.bool)
            kept = body.binary("tract_core_bitor", kept, lost, torch.bool)
        return [
            body.select(kept, state, new, kind)
            for state, new, kind in zip(states, given, (numbers.dtype, torch.int64), strict=True)
        ]

    values, where = _scanned(emit, name, step, axis, [numbers, places], start)
    return [emit.cast(values, dtype), where]
