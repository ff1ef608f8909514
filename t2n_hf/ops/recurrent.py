"""Recurrent layers and their cells: LSTM, GRU and plain ones. A layer is a scan over the sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from t2n_hf.ops.builder import Builder
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.scan import scan
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["recurrent"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


@dataclass(frozen=True)
class _Weights:
    """One direction of one layer: weights of the input [G * H, I] and of the state [G * H, H], biases [G * H]."""

    input: Value
    state: Value
    input_bias: Value | None = None
    state_bias: Value | None = None
    projection: Value | None = None


# From the input's part of the gates, the state's part (both [N, G * H]) and the states [N, H], the next states.
_Gates: TypeAlias = Callable[[Builder, Value, Value, list[Value]], list[Value]]


def _parts(body: Builder, gates: Value, count: int) -> list[Value]:
    size = int(gates.shape[1]) // count
    return [body.slice(gates, 1, place * size, (place + 1) * size) for place in range(count)]


def _lstm_gates(body: Builder, from_input: Value, from_state: Value, states: list[Value]) -> list[Value]:
    gates = body.binary("add", from_input, from_state, from_input.dtype)
    first, forget, fresh, out = _parts(body, gates, 4)
    kept = body.binary("mul", body.unary("sigmoid", forget), states[1], gates.dtype)
    added = body.binary("mul", body.unary("sigmoid", first), body.unary("tanh", fresh), gates.dtype)
    cell = body.binary("add", kept, added, gates.dtype)
    return [body.binary("mul", body.unary("sigmoid", out), body.unary("tanh", cell), gates.dtype), cell]


def _gru_gates(body: Builder, from_input: Value, from_state: Value, states: list[Value]) -> list[Value]:
    dtype = from_input.dtype
    input_parts, state_parts = _parts(body, from_input, 3), _parts(body, from_state, 3)
    reset, update = (
        body.unary("sigmoid", body.binary("add", input_parts[place], state_parts[place], dtype)) for place in (0, 1)
    )
    fresh = body.unary(
        "tanh", body.binary("add", input_parts[2], body.binary("mul", reset, state_parts[2], dtype), dtype)
    )
    # (1 - update) * fresh + update * state
    moved = body.binary("mul", update, body.binary("sub", states[0], fresh, dtype), dtype)
    return [body.binary("add", fresh, moved, dtype)]


def _plain_gates(activation: str) -> _Gates:
    def gates(body: Builder, from_input: Value, from_state: Value, states: list[Value]) -> list[Value]:
        return [body.unary(activation, body.binary("add", from_input, from_state, from_input.dtype))]

    return gates


def _affine(body: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    product = body.matmul(x, weight, transpose_right=True)
    return product if bias is None else body.binary("add", product, bias, x.dtype)


def _direction(
    emit: Builder, gates: _Gates, x: Value, states: list[Value], weights: _Weights, reverse: bool
) -> tuple[Value, list[Value]]:
    """Run along x [S, N, I] from states [N, H]: outputs [S, N, H] and the last states."""
    shared = {"weight": weights.state, "bias": weights.state_bias, "projection": weights.projection}

    def step(
        body: Builder, elements: list[Value], states: list[Value], shared: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        weight, *others = shared
        bias = others.pop(0) if weights.state_bias is not None else None
        following = gates(body, elements[0], _affine(body, states[0], weight, bias), states)
        if weights.projection is not None:
            following[0] = _affine(body, following[0], others[0], None)
        return following, [following[0]]

    # The input's part of the gates does not wait for the states: one product for the whole sequence.
    result = scan(
        emit,
        f"{emit.base}_step",
        step,
        elements={"gates": _affine(emit, x, weights.input, weights.input_bias)},
        states=dict(zip(("hidden", "cell"), states, strict=False)),
        shared={name: value for name, value in shared.items() if value is not None},
        reverse=reverse,
    )
    return result.outputs[0], result.states


def _layers(
    emit: Emit, gates: _Gates, x: Value, states: list[Value], weights: list[_Weights], bidirectional: bool
) -> tuple[Value, list[Value]]:
    """All layers over x [S, N, I]; states are [layers * directions, N, H] each, and so are those that come out."""
    directions = 2 if bidirectional else 1
    last: list[list[Value]] = []
    for place, mine in enumerate(weights):
        if place % directions == 0:
            source, outputs = x, []
        start = [emit.squeeze(emit.slice(state, 0, place, place + 1), [0]) for state in states]
        output, final = _direction(emit, gates, source, start, mine, place % directions == 1)
        outputs.append(output)
        last.append([emit.unsqueeze(state, [0]) for state in final])
        x = emit.concat(outputs, 2, x.dtype)
    return x, [emit.concat([final[n] for final in last], 0, x.dtype) for n in range(len(states))]


def _grouped(params: Sequence[Value], has_biases: bool, projected: bool) -> list[_Weights]:
    count = 2 + 2 * has_biases + projected
    groups = [list(params[start : start + count]) for start in range(0, len(params), count)]
    if has_biases:
        return [_Weights(*group) for group in groups]
    return [_Weights(group[0], group[1], projection=group[2] if projected else None) for group in groups]


_GATES = {
    "lstm": _lstm_gates,
    "gru": _gru_gates,
    "rnn_tanh": _plain_gates("tanh"),
    "rnn_relu": _plain_gates("relu"),
}


def recurrent(  # noqa: PLR0917 - the signature of torch's own operators
    emit: Emit,
    kind: str,
    x: Value,
    hx: list[Value],
    params: list[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Value]:
    """Outputs of the last layer, then each kind of last state. The capture makes this call of torch's layers."""
    if train and dropout:
        raise emit.refuse("dropout between recurrent layers is random; put the module in inference with eval()")
    directions = 2 if bidirectional else 1
    projected = len(params) // (num_layers * directions) == 3 + 2 * has_biases
    weights = _grouped(params, has_biases, projected)
    source = emit.transpose(x, [1, 0, 2]) if batch_first else x
    output, last = _layers(emit, _GATES[kind], source, hx, weights, bidirectional)
    return [emit.transpose(output, [1, 0, 2]) if batch_first else output, *last]


@_emits(_aten.lstm.input)
def lstm(emit: Emit, x: Value, hx: list[Value], params: list[Value], *options: Any) -> list[Value]:  # noqa: ANN401
    """Outputs of the last layer, last hidden states, last cell states."""
    return recurrent(emit, "lstm", x, hx, params, *options)


@_emits(_aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)
def rnn(emit: Emit, x: Value, hx: Value, params: list[Value], *options: Any) -> list[Value]:  # noqa: ANN401
    """Outputs of the last layer, last hidden states."""
    return recurrent(emit, _kind(emit), x, [hx], params, *options)


def _kind(emit: Emit) -> str:
    """Which gates the operator of the node has, by its name: "gru" for aten.gru.input and for aten.gru_cell.default."""
    return str(emit.node.target).split(".")[1].removesuffix("_cell")


def _cell(emit: Emit, gates: _Gates, x: Value, states: list[Value], weights: _Weights) -> list[Value]:
    from_input = _affine(emit, x, weights.input, weights.input_bias)
    return gates(emit, from_input, _affine(emit, states[0], weights.state, weights.state_bias), states)


@_emits(_aten.lstm_cell.default)
def lstm_cell(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    hx: list[Value],
    w_ih: Value,
    w_hh: Value,
    b_ih: Value | None = None,
    b_hh: Value | None = None,
) -> list[Value]:
    """Next hidden and cell state of one step."""
    return _cell(emit, _lstm_gates, x, hx, _Weights(w_ih, w_hh, b_ih, b_hh))


@_emits(_aten.gru_cell.default, _aten.rnn_tanh_cell.default, _aten.rnn_relu_cell.default)
def rnn_cell(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    hx: Value,
    w_ih: Value,
    w_hh: Value,
    b_ih: Value | None = None,
    b_hh: Value | None = None,
) -> Value:
    """Next hidden state of one step."""
    return _cell(emit, _GATES[_kind(emit)], x, [hx], _Weights(w_ih, w_hh, b_ih, b_hh))[0]
