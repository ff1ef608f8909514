import pytest
import torch
from torch import nn
from torch._subclasses.fake_impls import fast_detach
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx

from t2n_hf.trace.alike import ALIKE_OP
from t2n_hf.trace.capture import capture
from t2n_hf.trace.direct_call import seen_call, traced_by
from t2n_hf.trace.interface import Interface


def traced(function, *tensors):
    return make_fx(function, tracing_mode="symbolic")(*tensors).graph


def test_tensors_like_results_are_what_a_detached_copy_is_and_nobody_knows_them():
    def forward(x):
        seen = seen_call(ALIKE_OP(x, 2))
        assert seen.tracer is traced_by()
        for like, fresh in zip(seen.results, seen.fresh(), strict=True):
            copy = fast_detach(like.fake_mode, like)
            assert type(fresh) is type(copy)
            assert fresh is not like
            assert (fresh.shape, fresh.dtype, fresh.device) == (copy.shape, copy.dtype, copy.device)
            assert (fresh.stride(), fresh.requires_grad, vars(fresh)) == (copy.stride(), False, vars(copy))
            assert get_proxy_slot(fresh, seen.tracer, None) is None
        assert len({id(tensor) for tensor in (*seen.fresh(), *seen.repeated(3).fresh())}) == 8
        return x + 1

    traced(forward, torch.zeros(3, 2))


def test_results_with_values_are_no_pattern_for_others():
    assert not seen_call([torch.zeros(3)]).is_fake
    assert traced_by() is None


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
