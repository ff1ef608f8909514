"""Recurrences of state-space models and of linear attention, as operators, and how tract's scan runs them.

transformers walks along a sequence in Python, or cuts it into chunks of a fixed length: either way a capture knows one
length only. These operators stand for the whole walk. Their first axis is time. PyTorch can call them too.
"""

import torch

from t2n_hf.ops.builder import Builder
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.scan import scan
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["gated_scan", "linear_scan", "wkv_scan"]


@torch.library.custom_op("t2n_hf::gated_scan", mutates_args=())
def gated_scan(  # noqa: PLR0917 - what a gated recurrence is made of
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    axis: int,
    rate: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write products of keys and values into a decaying state, and read it by queries; all floats of one dtype.

    For each t: `state *= exp(decay[t] * rate)`, `state += key[t] * value[t]`, `out[t] = sum(state * query[t], axis)`.
    With `beta` only the news are written (the delta rule): `value[t]` is first replaced by
    `(value[t] - sum(state * key[t], axis)) * beta[t]`, with the state as it has decayed.

    Args:
        query: [S, ...], broadcast against the state at each step, as `key`, `value`, `decay` and `beta` are.
        key: [S, ...], of length 1 where the values vary.
        value: [S, ...], of length 1 along `axis`.
        decay: [S, ...], logarithm of the factor, or of its power when there is a rate.
        state: the state before the first step.
        axis: axis of the state (>= 0) that is summed over.
        rate: broadcast against the state; None is 1.
        beta: [S, ...], of length 1 along `axis`.

    Returns the outputs, [S, *(shape of the state without `axis`)], and the state after the last step.
    """
    outputs = []
    for t in range(query.shape[0]):
        state = state * torch.exp(decay[t] if rate is None else decay[t] * rate)
        written = value[t]
        if beta is not None:
            written = (written - (state * key[t]).sum(axis, keepdim=True)) * beta[t]
        state = state + key[t] * written
        outputs.append((state * query[t]).sum(axis))
    return torch.stack(outputs), state


@gated_scan.register_fake
def _(query, key, value, decay, state, axis, rate=None, beta=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
    rest = [length for place, length in enumerate(state.shape) if place != axis]
    return state.new_empty(query.shape[0], *rest), torch.empty_like(state)


@torch.library.custom_op("t2n_hf::linear_scan", mutates_args=())
def linear_scan(factor: torch.Tensor, term: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`state = factor[t] * state + term[t]` for each t; `factor` and `term` are [S, *(shape of the state)].

    Returns all states, [S, ...], and the last one.
    """
    states = []
    for t in range(term.shape[0]):
        state = factor[t] * state + term[t]
        states.append(state)
    return torch.stack(states), state.clone()


@linear_scan.register_fake
def _(factor, term, state):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return torch.empty_like(term), torch.empty_like(state)


@torch.library.custom_op("t2n_hf::wkv_scan", mutates_args=())
def wkv_scan(  # noqa: PLR0917 - what the recurrence is made of
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    first: torch.Tensor,
    top: torch.Tensor,
    bottom: torch.Tensor,
    peak: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RWKV's weighted mean of past values, with exponents kept small: all f32, `key` and `value` [S, B, D].

    `top / bottom` is the mean so far, both divided by exp(`peak`); they are [B, D], and zeros with any finite peak say
    that nothing was seen. `decay` (added to the exponents at each step) and `first` (for the present token) are [D].

    Returns the means, [S, B, D], then `top`, `bottom` and `peak` after the last step.
    """
    outputs = []
    for t in range(key.shape[0]):
        now = key[t] + first
        highest = torch.maximum(peak, now)
        old, new = torch.exp(peak - highest), torch.exp(now - highest)
        outputs.append((old * top + new * value[t]) / (old * bottom + new))
        highest = torch.maximum(peak + decay, key[t])
        old, new = torch.exp(peak + decay - highest), torch.exp(key[t] - highest)
        top, bottom, peak = old * top + new * value[t], old * bottom + new, highest
    return torch.stack(outputs), top, bottom, peak


@wkv_scan.register_fake
def _(key, value, decay, first, top, bottom, peak):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
    return torch.empty_like(key), torch.empty_like(top), torch.empty_like(bottom), torch.empty_like(peak)


class _Math:
    """Arithmetic of values of one dtype, written with a builder."""

    def __init__(self, builder: Builder, dtype: torch.dtype) -> None:
        self._builder = builder
        self._dtype = dtype

    def __call__(self, op: str, left: Value, right: Value) -> Value:
        return self._builder.binary(op, left, right, self._dtype)

    def exp(self, x: Value) -> Value:
        return self._builder.unary("exp", x)

    def sum(self, x: Value, axis: int, *, keepdim: bool) -> Value:
        return self._builder.reduce("sum_reduce", x, [axis], keepdim=keepdim)


@EMITTERS.emits(torch.ops.t2n_hf.gated_scan.default)
def _gated_scan(  # noqa: PLR0917 - the operator's own arguments
    emit: Emit,
    query: Value,
    key: Value,
    value: Value,
    decay: Value,
    state: Value,
    axis: int,
    rate: Value | None = None,
    beta: Value | None = None,
) -> list[Value]:
    elements = {"query": query, "key": key, "value": value, "decay": decay, **({} if beta is None else {"beta": beta})}

    def step(
        body: Builder, now: list[Value], states: list[Value], shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        math, (q, k, v, d, *b), (old,) = _Math(body, state.dtype), now, states
        kept = math("mul", old, math.exp(math("mul", d, shared[0]) if shared else d))
        for news in b:
            v = math("mul", math("sub", v, math.sum(math("mul", kept, k), axis, keepdim=True)), news)
        new = math("add", kept, math("mul", k, v))
        return [new], [math.sum(math("mul", new, q), axis, keepdim=False)]

    shared = {} if rate is None else {"rate": rate}
    result = scan(emit, "gated_scan", step, elements=elements, states={"state": state}, shared=shared)
    return [*result.outputs, *result.states]


@EMITTERS.emits(torch.ops.t2n_hf.linear_scan.default)
def _linear_scan(emit: Emit, factor: Value, term: Value, state: Value) -> list[Value]:
    def step(
        body: Builder, now: list[Value], states: list[Value], _shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        math = _Math(body, state.dtype)
        new = math("add", math("mul", now[0], states[0]), now[1])
        return [new], [new]

    elements = {"factor": factor, "term": term}
    result = scan(emit, "linear_scan", step, elements=elements, states={"state": state})
    return [*result.outputs, *result.states]


@EMITTERS.emits(torch.ops.t2n_hf.wkv_scan.default)
def _wkv_scan(  # noqa: PLR0917 - the operator's own arguments
    emit: Emit, key: Value, value: Value, decay: Value, first: Value, top: Value, bottom: Value, peak: Value
) -> list[Value]:
    def step(
        body: Builder, now: list[Value], states: list[Value], shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        math, (k, v), (a, b, p), (w, u) = _Math(body, key.dtype), now, states, shared

        def blend(past: Value, present: Value) -> tuple[Value, Value, Value]:
            highest = math("max", past, present)
            old, new = math.exp(math("sub", past, highest)), math.exp(math("sub", present, highest))
            tops = math("add", math("mul", old, a), math("mul", new, v))
            return tops, math("add", math("mul", old, b), new), highest

        tops, bottoms, _ = blend(p, math("add", k, u))
        return list(blend(math("add", p, w), k)), [math("div", tops, bottoms)]

    states = {"top": top, "bottom": bottom, "peak": peak}
    shared = {"decay": decay, "first": first}
    result = scan(emit, "wkv_scan", step, elements={"key": key, "value": value}, states=states, shared=shared)
    return [*result.outputs, *result.states]
