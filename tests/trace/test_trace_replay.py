import models
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from t2n_hf.hf.tasks import interface_of
from t2n_hf.trace import pieces, tracing
from t2n_hf.trace.capture import capture
from t2n_hf.trace.layers import bind
from t2n_hf.trace.quick_proxies import quick_proxies
from t2n_hf.trace.tracing import is_repeated, trace_layer


class Layer(nn.Module):
    """Two views, a write, a split and a value that comes back as it went in."""

    def __init__(self, factor=2.0, steps=1):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor, self.steps = factor, steps

    def forward(self, x, mask, store):
        y = self.linear(x).to(x.dtype) * self.factor
        for _ in range(self.steps):
            y = y.view(x.shape[0], 2, 2).flatten(1)
        left, right = y.chunk(2, dim=-1)
        total = torch.zeros_like(left)
        total.add_(right)
        store[0] = torch.cat([store[0], total], dim=0)
        return x + y, mask


class Noticed(Layer):
    def forward(self, x, mask, store):
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            return super().forward(x, mask, store)


class Swallowing(Layer):
    """Takes any error for one of its own."""

    def forward(self, x, mask, store):
        result = super().forward(x, mask, store)
        try:
            return result[0] * self.factor, result[1]
        except Exception:  # noqa: BLE001 - as models do
            return result


def fake_layer(mode, layer):
    for module in layer.modules():
        for name, value in list(module._parameters.items()):
            module._parameters[name] = mode.from_tensor(value.detach(), static_shapes=True)
    return layer.eval()


def repeated(first, second):
    """Whether `second` is seen to be `first` again, in a trace as it goes on around them."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    first, second = fake_layer(mode, first), fake_layer(mode, second)
    answers = []

    def body(x, mask, cache, other):
        with quick_proxies():
            call = bind(first, (x, mask, [cache]), {}, "layers.0")
            traced = trace_layer(first, call, "layers.0", "layer")
            again = bind(second, (x * 2, mask, [other]), {}, "layers.1")
            answers.append((traced.recording.complete, is_repeated(traced, second, again, traced.inputs, [2])))
            return x + 1

    tensors = [mode.from_tensor(torch.zeros(shape)) for shape in ((7, 4), (7,), (5, 2), (5, 2))]
    with mode, torch.no_grad():
        graph = make_fx(body, pre_dispatch=True, record_module_stack=True, _allow_non_fake_inputs=True)(*tensors).graph
    # What was run to be compared left nothing in the graph around it.
    operators = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert [node.name for node in operators] == ["mul", "add"]
    return answers[0]


def test_a_layer_that_does_the_same_is_seen_to():
    assert repeated(Layer(), Layer()) == (True, True)


@pytest.mark.parametrize("other", [Layer(factor=3.0), Layer(factor=2), Layer(steps=2), Layer(steps=0)], ids=str)
def test_a_layer_that_does_something_else_is_seen_to(other):
    assert repeated(Layer(), other) == (True, False)


def test_a_difference_is_not_taken_for_an_error_of_the_layer():
    assert repeated(Swallowing(), Swallowing(factor=3.0)) == (True, False)


def test_what_is_no_operator_is_not_recorded():
    assert repeated(Noticed(), Noticed()) == (False, False)


def test_the_second_layer_of_a_model_is_run_beside_the_first(monkeypatch):
    seen, traces = [], []
    monkeypatch.setattr(pieces, "is_repeated", lambda *given: seen.append(is_repeated(*given)) or seen[-1])
    monkeypatch.setattr(
        tracing, "_read_trace", lambda *given, read=tracing._read_trace: traces.append(1) or read(*given)
    )
    captured = capture(interface_of(models.m1().eval()), torch.float32, "pieces")
    assert (seen, len(traces), len(captured.pieces)) == ([True], 1, 1)
