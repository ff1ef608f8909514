"""Blocks of torch's settings are the calls in them; automatic types for the device that computes are refused."""

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.export.module_interface import module_interface
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.passes.blocks import inline_blocks

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type")

FREE = ({0: Dim("S", min=1)},)


class Layer(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = blocks

    def forward(self, x):
        y = x * 2
        for make in self.blocks:
            with make():
                parts = self.linear(y).split([1, 3], dim=-1)
                y = torch.cat([parts[1], parts[0] * y[:, :1]], dim=-1)
        return y + x


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(Layer(*blocks) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def other_device():
    """As `torch.autocast("cuda")` is where there is one; elsewhere torch makes that disabled."""
    block = torch.autocast("cuda", dtype=torch.bfloat16, enabled=False)
    block._enabled = True
    return block


BLOCKS = {
    "types off": lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=False),
    "types of another device": other_device,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}
AUTOMATIC = {"types": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


def captured(module, mode, dims=FREE):
    interface = Interface(
        module=module.eval(),
        args=(torch.zeros(3, 4),),
        dynamic_shapes=dims,
        input_names=("x",),
        output_names=("y",),
        layers=("layers",) if isinstance(module, Stack) else (),
        weight_owner=module,
    )
    return capture(interface, torch.float32, mode)


def run(result, module, x):
    weights = dict(module.named_parameters())
    places = [node for node in result.graph.nodes if node.op == "placeholder"]
    given = [weights[result.weights[node]] if node in result.weights else x for node in places]
    return fx.Interpreter(fx.GraphModule({}, result.graph)).run(*given)[0]


@pytest.mark.parametrize("names", [[name] for name in BLOCKS] + [list(BLOCKS)], ids=", ".join)
def test_the_calls_in_a_block_are_calls_of_the_graph(names):
    module = Layer(*(BLOCKS[name] for name in names))
    result = captured(module, "whole")
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(result, module, x), module(x))


@pytest.mark.parametrize("mode", ["pieces", "whole"])
@pytest.mark.parametrize("name", BLOCKS)
def test_layers_with_blocks_are_pieces(mode, name):
    result = captured(Stack(BLOCKS[name]), mode)
    assert len(result.pieces) == 1
    graphs = [result.graph, result.pieces[0].graph]
    calls = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert all(isinstance(t, torch._ops.OpOverload) or t.__name__ == "getitem" for t in calls)


def test_a_block_in_a_block_is_inlined():
    class Nested(nn.Module):
        def forward(self, x):
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                y = x * 2
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    y = y + x
                return y.sin()

    with torch.no_grad():
        result = captured(Nested(), "whole")
        x = torch.randn(2, 4)
        torch.testing.assert_close(run(result, Nested(), x), Nested()(x))


@pytest.mark.parametrize("mode", ["auto", "pieces", "whole"])
@pytest.mark.parametrize("dims", [FREE, None], ids=["free", "fixed"])
def test_automatic_types_are_refused_with_the_module_and_the_line(mode, dims):
    text = r"aten.linear.default in (layers.0.)?linear is called in torch.autocast\('cpu'\), .* in torch.bfloat16; .*"
    text += r"At .*test_trace_blocks.py:\d+: parts = self.linear"
    with pytest.raises(CaptureError, match=text) as refusal:
        captured(Stack(AUTOMATIC["types"]), mode, dims)
    assert "capture=" not in str(refusal.value)


@pytest.mark.parametrize("reads", [False, True])
def test_automatic_types_are_refused_where_a_module_is_run_once(reads):
    class Reading(Layer):
        def forward(self, x):
            return super().forward(x if reads and x.sum() > 1e9 else x * 2)

    text = r"aten.to.dtype in linear is called in torch.autocast\('cpu'\), .* in torch.bfloat16; .*"
    with pytest.raises(CaptureError, match=text + r"At .*test_trace_blocks.py:\d+: parts = self.linear"):
        captured(Reading(AUTOMATIC["types"]), "dispatch", None)
    if reads:
        with pytest.raises(CaptureError, match=text):
            module_interface(Reading(AUTOMATIC["types"]).eval(), args=(torch.zeros(3, 4),))


def test_types_that_an_archive_has_are_captured_where_a_module_is_run_once():
    module = Layer(lambda: torch.autocast("cpu", dtype=torch.float16))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(run(captured(module, "dispatch", None), module, x), module(x))


def test_automatic_types_around_nothing_that_has_any_are_no_fault():
    class Empty(nn.Module):
        def forward(self, x):
            with AUTOMATIC["types"]():
                length = x.shape[0]
            return x * length

    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(run(captured(Empty(), "whole"), Empty(), x), x * 3)


def test_graphs_without_blocks_stay_as_they_are():
    module = fx.symbolic_trace(lambda x: x * 2)
    before = str(module.graph)
    inline_blocks(module)
    assert str(module.graph) == before
