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

__all__ = ["gated_scan", "linear_scan", "mlstm_scan", "wkv_scan"]


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


@torch.library.custom_op("t2n_hf::mlstm_scan", mutates_args=())
def mlstm_scan(  # noqa: PLR0917 - what the recurrence is made of
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    write: torch.Tensor,
    keep: torch.Tensor,
    memory: torch.Tensor,
    normalizer: torch.Tensor,
    peak: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrix memory of xLSTM (Beck et al. 2024), with exponents kept small: all floats of one dtype.

    For each t, with both gates as logarithms and all that is kept divided by exp(`peak`):
    `memory = exp(keep[t]) * memory + exp(write[t]) * outer(key[t], value[t])`, the normalizer likewise without the
    value, and `out[t] = (query[t] @ memory) / (max(|query[t] . normalizer|, 1) + eps)`, where 1 is divided too.

    Args:
        query: [S, B, H, K].
        key: [S, B, H, K].
        value: [S, B, H, V].
        write: [S, B, H, 1].
        keep: [S, B, H, 1].
        memory: [B, H, K, V] before the first step.
        normalizer: [B, H, K].
        peak: [B, H, 1].
        eps: added to what is divided by.

    Returns the outputs, [S, B, H, V], then the three states after the last step.
    """
    outputs = []
    for t in range(query.shape[0]):
        highest = torch.maximum(keep[t] + peak, write[t])
        old, new = torch.exp(keep[t] + peak - highest), torch.exp(write[t] - highest)
        memory = old[..., None] * memory + (new * key[t])[..., None] * value[t][..., None, :]
        normalizer, peak = old * normalizer + new * key[t], highest
        weight = (query[t] * normalizer).sum(-1, keepdim=True).abs()
        outputs.append((query[t][..., None] * memory).sum(-2) / (torch.maximum(weight, torch.exp(-peak)) + eps))
    return torch.stack(outputs), memory, normalizer, peak


@mlstm_scan.register_fake
def _(query, key, value, write, keep, memory, normalizer, peak, eps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
    return torch.empty_like(value), torch.empty_like(memory), torch.empty_like(normalizer), torch.empty_like(peak)


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


@EMITTERS.emits(torch.ops.t2n_hf.mlstm_scan.default)
def _mlstm_scan(  # noqa: PLR0917 - the operator's own arguments
    emit: Emit,
    query: Value,
    key: Value,
    value: Value,
    write: Value,
    keep: Value,
    memory: Value,
    normalizer: Value,
    peak: Value,
    eps: float,
) -> list[Value]:
    def step(
        body: Builder, now: list[Value], states: list[Value], _shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        math, (q, k, v, i, f), (c, n, m) = _Math(body, query.dtype), now, states
        past = math("add", f, m)
        highest = math("max", past, i)
        old, new = math.exp(math("sub", past, highest)), math.exp(math("sub", i, highest))
        k = math("mul", new, k)
        columns = body.unsqueeze(v, [2])
        written = math("mul", body.unsqueeze(k, [3]), columns)
        c = math("add", math("mul", body.unsqueeze(old, [3]), c), written)
        n = math("add", math("mul", old, n), k)
        weight = body.unary("abs", math.sum(math("mul", q, n), 2, keepdim=True))
        least = math.exp(body.unary("neg", highest))
        read = math.sum(math("mul", body.unsqueeze(q, [3]), c), 2, keepdim=False)
        scale = body.binary("add", math("max", weight, least), eps, query.dtype)
        return [c, n, highest], [math("div", read, scale)]

    elements = {"query": query, "key": key, "value": value, "write": write, "keep": keep}
    states = {"memory": memory, "normalizer": normalizer, "peak": peak}
    result = scan(emit, "mlstm_scan", step, elements=elements, states=states)
    return [*result.outputs, *result.states]
