"""torch.compile over opaque weights: packed ones are part of the graph, offloaded ones run between graphs."""

import pytest
import torch
from torch import nn

from t2n_hf.residency import TensorResidencyPool
from t2n_hf.tensor import OffloadedTensor, QScalePerGroupF16, QTensor, QTensorTractScaleOnly
from t2n_hf.tensor.transposed import TransposedTensor


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        for module in (self.embed, *self.layers):
            module.weight = nn.Parameter(make(module.weight.detach()), requires_grad=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(x)


def offloaded(value):
    return OffloadedTensor.from_original_tensor(value, "w")


def turned(value):
    return TransposedTensor.over(QTensorTractScaleOnly.quantize(value.T.contiguous()))


MAKE = {
    "packed": QTensorTractScaleOnly.quantize,
    "offloaded": offloaded,
    "offloaded packed": lambda value: offloaded(QTensorTractScaleOnly.quantize(value)),
}
TOKENS = torch.tensor([[1, 2, 3]])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_the_same_again_and_again(kind, backend):
    model = Net(MAKE[kind])
    with torch.no_grad():
        expected = model(TOKENS)
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            assert torch.allclose(compiled(TOKENS), expected, atol=1e-6)
        with TensorResidencyPool(8192) as pool:
            for weight in model.parameters():
                if isinstance(weight, OffloadedTensor):
                    weight.bind_pool(pool)
            assert torch.allclose(compiled(TOKENS), expected, atol=1e-6)
        model.layers[0].weight.copy_(model.layers[1].weight)
        assert torch.allclose(compiled(TOKENS), model(TOKENS), atol=1e-6)


def by_scheme(value):
    scales = (value.abs().amax(-1, keepdim=True) / -8).half()
    return QTensor(value, QScalePerGroupF16(32, scales, 4))


@pytest.mark.parametrize("make", [QTensorTractScaleOnly.quantize, turned, by_scheme])
def test_a_model_of_packed_weights_is_one_graph(make):
    model = nn.Linear(32, 32)
    model.weight = nn.Parameter(make(torch.randn(32, 32)), requires_grad=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 32)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_one_graph_over_offloaded_weights_is_refused_with_the_reason():
    compiled = torch.compile(Net(offloaded), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"read from disk when it is used.*leave fullgraph out"):
        compiled(TOKENS)
