"""Calls that are kept beside the graph while torch.export works on it are in it afterwards as if they never were."""

import operator

import pytest
import torch
import transformers as hf
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import make_graph
from t2n_hf.hf.tasks import interface_of
from t2n_hf.trace.alike import ALIKE_OP
from t2n_hf.trace.capture import capture
from t2n_hf.trace.direct_call import seen_call
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.late_calls import LATE_OP, LateCalls, LateError, outputs_left_out
from t2n_hf.trace.pieces import LAYER_OP

LAYERS = 8


class Layer(nn.Module):
    """Replaces its own part of the past; `scale` and `bias` may be anything."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(4, 4)

    def forward(self, x, past, scale=1, bias=None):
        key = torch.cat([past[2 * self.layer_idx], x])
        past[2 * self.layer_idx] = key
        past[2 * self.layer_idx + 1] = past[2 * self.layer_idx + 1] * 2
        x = self.linear(x) * scale + key.sum(0)
        return x if bias is None else x + bias


class Stack(nn.Module):
    """`walk(layers, x, past)` gives a tensor, or several."""

    def __init__(self, walk):
        super().__init__()
        self.layers = nn.ModuleList(Layer(at) for at in range(LAYERS))
        self.walk = walk

    def forward(self, x, past):
        past = list(past)
        return self.walk(self.layers, x, past), past


def chain(layers, x, past):
    for layer in layers:
        x = layer(x, past)
    return x


def adds_after_one(layers, x, past):
    for at, layer in enumerate(layers):
        x = layer(x, past)
        if at == 4:
            x = x + 1
    return x


def adds_after_each(layers, x, past):
    start = x
    for layer in layers:
        x = layer(x, past) + start
    return x


def writes_after_one(layers, x, past):
    for at, layer in enumerate(layers):
        before = x
        x = layer(x, past)
        if at in (3, 5):
            x.mul_(3)
            x = x + before
    return x


def writes_into_the_past(layers, x, past):
    past[6].mul_(5)
    for at, layer in enumerate(layers):
        if at == 4:
            past[2] += 1
            past[12] = past[12] + past[0].sum()
        x = layer(x, past)
    return x


def counts(layers, x, past):
    for at, layer in enumerate(layers):
        x = layer(x, past, scale=at)
    return x


def counts_by_kinds(layers, x, past):
    for at, layer in enumerate(layers):
        x = layer(x, past, scale=at % 2 + 1)
    return x


def biases_made_before(layers, x, past):
    biases = [x.sum(0) * at for at in range(LAYERS)]
    for layer, bias in zip(layers, biases, strict=True):
        x = layer(x, past, bias=bias)
    return x


def biases_made_between(layers, x, past):
    start = x
    for at, layer in enumerate(layers):
        x = layer(x, past, bias=start[0] * at)
    return x


def biases_that_are_the_input_at_first(layers, x, past):
    y = x
    for at, layer in enumerate(layers):
        y = layer(y, past, bias=y if at < 2 else x)
    return y


def one_bias(layers, x, past):
    bias = x.sum(0)
    for layer in layers:
        x = layer(x, past, bias=bias)
    return x


def keeps_all(layers, x, past):
    states = []
    for layer in layers:
        x = layer(x, past)
        states.append(x)
    return states, x


def stacks_all(layers, x, past):
    states = []
    for layer in layers:
        x = layer(x, past)
        states.append(x)
    return torch.stack(states[1::2]), states[3]


def gives_one_twice(layers, x, past):
    states = keeps_all(layers, x, past)[0]
    return states[2], states[5], states[2], states[-1]


def lets_one_go(layers, x, past):
    states = keeps_all(layers, x, past)[0]
    return states[4].sum() * 0 + x


def asks_for_a_length(layers, x, past):
    for layer in layers:
        x = layer(x, past) * x.shape[0]
    return x + past[5].shape[0]


def goes_round(layers, x, past):
    return chain(layers, chain(layers, x, past), past)


def remembers(layers, x, past):
    seen = {}
    for layer in layers:
        seen[id(layer)] = len(seen)
        x = layer(x, past)
        if len(seen) == 3:
            x = -x
    return x


def looks_at_another_past(layers, x, past):
    for at, layer in enumerate(layers):
        x = layer(x, past)
        if at == 5:
            x = x + past[4].sum(0) + past[15].sum(0)
    return x


WALKS = (
    *(chain, adds_after_one, adds_after_each, writes_after_one, writes_into_the_past, counts, counts_by_kinds),
    *(biases_made_before, biases_made_between, one_bias, keeps_all, stacks_all, gives_one_twice, lets_one_go),
    *(asks_for_a_length, goes_round, remembers, looks_at_another_past, biases_that_are_the_input_at_first),
)


def interface(walk):
    module, count = Stack(walk), 2 * LAYERS
    past = [torch.zeros(5, 4) for _ in range(count)]
    results = torch.utils._pytree.tree_leaves(walk(module.layers, torch.zeros(3, 4), list(past)))
    lengths = {0: Dim("P", min=2)}
    return Interface(
        module=module,
        args=(torch.zeros(3, 4), past),
        dynamic_shapes=(None, [lengths] * count),
        input_names=("x", *(f"past_{at}" for at in range(count))),
        output_names=(*(f"y_{at}" for at in range(len(results))), *(f"new_{at}" for at in range(count))),
        weight_owner=module,
        layers=("layers",),
    )


def at_once(monkeypatch):
    """Have every call be a node from the beginning."""
    monkeypatch.setattr(LateCalls, "call", lambda *_arguments: None)


def described(captured):
    """Every node in order, by what it calls and the places of what it is given, and what it gives."""
    places = {node: at for at, node in enumerate(captured.graph.nodes)}
    return [
        (node.op, str(node.target) if node.op == "call_function" else "", f"{arguments}", f"{node.meta.get('val')}")
        for node in captured.graph.nodes
        for arguments in [torch.fx.map_arg((node.args, node.kwargs), places.__getitem__)]
    ]


def calls_in(graph):
    return [node for node in graph.nodes if node.target is LAYER_OP]


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_a_graph_is_what_it_is_when_every_call_is_a_node_from_the_beginning(walk, monkeypatch):
    face = interface(walk)
    late = capture(face, torch.float32, "pieces")
    text = make_graph(face, ExportConfig(dtype="f32", capture="pieces")).text
    assert not [node for node in late.graph.nodes if node.target in (LATE_OP, ALIKE_OP)]
    at_once(monkeypatch)
    other = capture(face, torch.float32, "pieces")
    assert described(late) == described(other)
    assert (late.calls, late.canonical, late.asserts) == (other.calls, other.canonical, other.asserts)
    assert [name for _, name in late.outputs] == [name for _, name in other.outputs] == list(face.output_names)
    assert text == make_graph(face, ExportConfig(dtype="f32", capture="pieces")).text


@pytest.mark.parametrize(
    "walk", [chain, one_bias, keeps_all, stacks_all, adds_after_one, biases_that_are_the_input_at_first]
)
def test_calls_are_in_the_order_of_a_capture_of_every_layer(walk):
    face = interface(walk)
    texts = [make_graph(face, ExportConfig(dtype="f32", capture=mode)).text for mode in ("pieces", "whole")]
    assert texts[0] == texts[1]


def test_what_torch_works_on_does_not_grow_with_the_layers(monkeypatch):
    sizes = []
    restored = LateCalls.restored

    def seen(self, graph, inputs):
        sizes.append(len([node for node in graph.nodes if node.op == "call_function"]))
        restored(self, graph, inputs)

    monkeypatch.setattr(LateCalls, "restored", seen)
    whole = [len(calls_in(capture(interface_of(llama(layers)), torch.float32).graph)) for layers in (4, 12)]
    assert whole == [4, 12]
    assert sizes[0] == sizes[1]


def llama(layers, **options):
    config = hf.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        **options,
    )
    return hf.LlamaForCausalLM(config).eval()


def test_a_graph_that_lost_what_calls_are_put_at_is_captured_again_without(monkeypatch):
    face, restored = interface(keeps_all), LateCalls.restored
    want = capture(face, torch.float32, "pieces")
    tried = []

    def lost(self, graph, inputs):
        tried.append(self)
        for node in graph.nodes:
            if node.target is LATE_OP:
                node.replace_all_uses_with(inputs[0])
        graph.eliminate_dead_code()
        restored(self, graph, inputs)

    monkeypatch.setattr(LateCalls, "restored", lost)
    found = capture(face, torch.float32, "pieces")
    assert len(tried) == 1
    assert described(found) == described(want)


def traced(forward):
    """The graph of a trace by make_fx, with the late calls put back."""
    kept = {}

    def body(x, y):
        seen = seen_call(ALIKE_OP(x, 2))
        kept["late"] = LateCalls(seen.tracer)
        return outputs_left_out(forward(kept["late"], seen, x, y))

    graph = make_fx(body, tracing_mode="symbolic")(torch.zeros(3, 2), torch.zeros(3, 2)).graph
    return graph, kept["late"]


def test_a_result_is_a_node_when_something_is_computed_from_it_and_another_way_not():
    def forward(late, seen, x, y):
        one = late.call(seen, ALIKE_OP, 7, [x])
        two = late.call(seen, ALIKE_OP, 8, [one[1], y])
        return [two[0] + 1, one[0], two[1], two[1]]

    graph, late = traced(forward)
    assert [node.args[:3] for node in graph.nodes if node.target is LATE_OP] == [(0, 0, 0), (0, 1, 0)]
    late.restored(graph, [])
    first, second = [node for node in graph.nodes if node.target is ALIKE_OP and node.args[0] in (7, 8)]
    assert (first.args, first.next.args, first.next.next.args) == ((7, [graph_input(graph, 0)]), (first, 0), (first, 1))
    assert second.args == (8, [first.next.next, graph_input(graph, 1)])
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    assert [node.target for node in output] == [torch.ops.aten.add.Tensor, *[operator.getitem] * 3]
    assert [node.args for node in output[1:]] == [(first, 0), (second, 1), (second, 1)]
    graph.lint()


def graph_input(graph, place):
    return [node for node in graph.nodes if node.op == "placeholder"][place]


def test_what_no_tracer_knows_is_no_argument_of_a_late_call():
    def forward(late, seen, x, y):
        stranger = seen.fresh()[0]
        assert late.call(seen, ALIKE_OP, 7, [x, stranger]) is None
        assert not late.runs
        return [x + y]

    traced(forward)


def test_a_run_of_another_trace_is_refused():
    def forward(late, seen, x, y):
        late.first = 3
        return [late.call(seen, ALIKE_OP, 7, [x])[0] + 1]

    graph, late = traced(forward)
    with pytest.raises(LateError, match="run 3 is of another trace"):
        LateCalls(late.tracer).restored(graph, [])
