"""dispatch_trace over tensors that have no values: fake ones, also of symbolic lengths, and opaque ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.fallback import materialised_counts
from t2n_hf.trace import dispatch_trace

X = torch.arange(12.0).reshape(3, 4)


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def fake_of(tensor, free=()):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC if axis in free else DimDynamic.STATIC for axis in range(tensor.ndim)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def test_a_value_that_was_written_without_values_is_not_there_for_any_view_of_it():
    fake = fake_of(X)

    def function(x):
        buffer = torch.zeros(2, 4)
        buffer[1].copy_(x[0])
        return x + buffer.sum().item()

    with pytest.raises(CaptureError, match="needs the values of a tensor that has only a shape"):
        dispatch_trace(function, (fake,))


def test_over_fake_tensors_the_graph_is_that_of_the_real_ones():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        real, faked = dispatch_trace(model, (x,)), dispatch_trace(model, (fake_of(x),))
        assert targets(real) == targets(faked)
        torch.testing.assert_close(faked(x), model(x))


def test_symbolic_lengths_stay_free():
    def function(x):
        length = x.shape[0]
        steps = torch.arange(length * 2, dtype=x.dtype).reshape(length, 2).sum(1)
        return x.reshape(-1).view(2 * length, -1), x / length + steps[:, None], F.pad(x, (0, 0, 0, length)), length + 1

    module = dispatch_trace(function, (fake_of(X, free=(0,)),))
    for length in (2, 3, 7):
        x = torch.randn(length, 4)
        torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"was torch.float32 .*4.* in the trace"):
        module(torch.randn(3, 5))


@pytest.mark.parametrize(
    "number",
    [
        lambda n: n**-0.5,
        lambda n: n / 3,
        lambda n: torch.sym_sqrt(n) + 0.5,
        lambda n: round(n / 4),
        lambda n: torch.sym_int(n * 1.5) + torch.sym_max(n, 4) - n // 2,
    ],
    ids=["power", "quotient", "root", "rounded", "whole"],
)
def test_numbers_that_are_calculated_from_symbolic_lengths_stay_free(number):
    def function(x):
        return x * number(x.shape[0])

    module = dispatch_trace(function, (fake_of(X, free=(0,)),))
    for length in (2, 5, 9):
        x = torch.randn(length, 4)
        assert torch.equal(module(x), function(x))


def test_a_number_that_no_graph_can_compute_is_refused():
    with pytest.raises(CaptureError, match=r"OpaqueUnaryFn_tan.*which a graph cannot compute"):
        dispatch_trace(lambda x: x * torch._sym_tan(x.shape[0]), (fake_of(X, free=(0,)),))


def test_a_branch_on_a_symbolic_length_is_held():
    module = dispatch_trace(lambda x: x * 2 if x.shape[0] > 2 else x * 3, (fake_of(X, free=(0,)),))
    assert torch.equal(module(torch.ones(5, 4)), torch.full((5, 4), 2.0))
    with pytest.raises(ConfigError, match="the trace holds for"):
        module(torch.ones(2, 4))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_opaque_parameters_are_never_made_dense_while_they_are_traced(mode, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(QTensorTractScaleOnly.quantize(layer.weight.detach()), requires_grad=False)

    def function(x):
        return model(x) + model[0].weight[:1, :32] + model[2].weight.T[0]

    traced = model if kind == "module" else function
    x = torch.randn(2, 32)
    with mode():
        before = materialised_counts()
        module = dispatch_trace(traced, (x,))
        assert materialised_counts() == before
        torch.testing.assert_close(module(x), traced(x))
    packed = [parameter for parameter in module.parameters() if isinstance(parameter, QTensorTractScaleOnly)]
    assert [id(parameter) for parameter in packed] == [id(model[0].weight), id(model[2].weight)]
