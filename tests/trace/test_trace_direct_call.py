import operator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from t2n_hf.trace.alike import ALIKE_OP
from t2n_hf.trace.capture import capture
from t2n_hf.trace.direct_call import call_like, seen_call
from t2n_hf.trace.interface import Interface


def traced(function, *tensors):
    return make_fx(function, tracing_mode="symbolic")(*tensors).graph


def test_a_call_recorded_directly_is_the_node_that_a_dispatched_one_is():
    def forward(x, y):
        first = ALIKE_OP(x, 2)
        second = call_like(seen_call(first), ALIKE_OP, (y, 2))
        return first[1] + second[0].shape[0], second[1].t() @ second[0]

    graph = traced(forward, torch.zeros(3, 2), torch.zeros(3, 2))
    dispatched, direct = [node for node in graph.nodes if node.target is ALIKE_OP]
    assert [node.args[0].name for node in (dispatched, direct)] == ["x_1", "y_1"]
    items = [node for node in direct.users if node.target is operator.getitem]
    assert [node.args[1] for node in items] == [0, 1]
    assert str(direct.meta["val"][0].shape) == str(dispatched.meta["val"][0].shape) == str(items[0].meta["val"].shape)
    product = next(node for node in graph.nodes if node.target is torch.ops.aten.mm.default)
    assert {source for node in product.all_input_nodes for source in (node, *node.all_input_nodes)} >= set(items)


def test_results_of_direct_calls_are_tensors_of_their_own():
    def forward(x):
        seen = seen_call(ALIKE_OP(x, 1))
        one, two = (call_like(seen, ALIKE_OP, (x, 1))[0] for _ in range(2))
        assert one is not two
        return one - two

    graph = traced(forward, torch.zeros(3))
    left, right = next(node for node in graph.nodes if node.target is torch.ops.aten.sub.Tensor).args
    assert left.args[0] is not right.args[0]


def test_what_the_tracer_does_not_know_goes_through_the_dispatcher():
    with FakeTensorMode():
        outside = torch.empty(3)
    kept = []

    def forward(x):
        kept.append(seen_call(ALIKE_OP(x, 1)))
        assert call_like(kept[-1], ALIKE_OP, (outside, 1)) is None
        assert call_like(kept[0], ALIKE_OP, (x, 1)) is None or len(kept) == 1
        return x + 1

    traced(forward, torch.zeros(3))
    traced(forward, torch.zeros(3))
    assert len(kept) == 2
    assert call_like(kept[0], ALIKE_OP, (outside, 1)) is None


class Layer(nn.Module):
    """Reads its own part of the past, or that of the first layer, and replaces its own."""

    def __init__(self, layer_idx, reads_first):
        super().__init__()
        self.layer_idx = layer_idx
        self.reads_first = reads_first
        self.linear = nn.Linear(4, 4)

    def forward(self, x, past):
        key = torch.cat([past[0 if self.reads_first else 2 * self.layer_idx], x])
        past[2 * self.layer_idx] = key
        past[2 * self.layer_idx + 1] = past[2 * self.layer_idx + 1] * 2
        return self.linear(x) + key.sum(0)


class Stack(nn.Module):
    def __init__(self, *readers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(at, first) for at, first in enumerate(readers))

    def forward(self, x, past):
        past = list(past)
        for layer in self.layers:
            x = layer(x, past)
        return x, past


@pytest.mark.parametrize("readers", [[False] * 6, [False, False, True, True, False, False]])
def test_layers_are_traced_with_the_parts_of_the_past_that_they_use(readers):
    module, count = Stack(*readers), 2 * len(readers)
    lengths = {0: Dim("P", min=2)}
    interface = Interface(
        module=module,
        args=(torch.zeros(3, 4), [torch.zeros(5, 4) for _ in range(count)]),
        dynamic_shapes=(None, [lengths] * count),
        input_names=("x", *(f"past_{at}" for at in range(count))),
        output_names=("y", *(f"new_{at}" for at in range(count))),
        weight_owner=module,
        layers=("layers",),
    )
    found = capture(interface, torch.float32)
    layers = [node for node in found.graph.nodes if node.name.startswith("layer")]
    given = dict(found.inputs)
    names = [[given.get(node, "") for node in layer.args[1]] for layer in layers]
    for at, (reads_first, mine) in enumerate(zip(readers, names, strict=True)):
        assert f"past_{2 * at + 1}" in mine
        if reads_first:
            assert layers[0] in {source for node in layers[at].all_input_nodes for source in node.all_input_nodes}
        else:
            assert set(mine) <= {"x", "", f"past_{2 * at}", f"past_{2 * at + 1}"}
