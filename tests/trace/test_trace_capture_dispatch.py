import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.fallback import materialised_counts
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def interface(module, *args, dims=None):
    return Interface(
        module=module.eval(),
        args=args,
        dynamic_shapes=dims,
        input_names=tuple(f"x{at}" for at in range(len(args))),
        output_names=("y",),
        asserts=() if dims is None else ("S >= 1",),
        weight_owner=module,
    )


def run(captured, module, *inputs):
    """Run a captured graph on the module's own weights."""
    stored = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {**{node: stored[name] for node, name in captured.weights.items()}, **captured.constants}
    values |= {node: value for (node, _), value in zip(captured.inputs, inputs, strict=True)}
    gm = torch.fx.GraphModule(nn.Module(), captured.graph)
    arguments = [values[node] for node in captured.graph.nodes if node.op == "placeholder"]
    return torch.fx.Interpreter(gm).run(*arguments)[0]


def targets(captured):
    return [node.target for node in captured.graph.nodes if node.op == "call_function"]


class Padded(nn.Module):
    """Looks at a value that follows from lengths and buffers alone, as audio models do for their padding."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("stride", torch.tensor(2), persistent=False)

    def forward(self, x):
        missing = int((torch.ceil(torch.tensor(x.shape[0]) / self.stride) * self.stride).item()) - x.shape[0]
        if missing > 0:
            x = torch.cat([x, x.new_zeros(missing, 4)])
        return self.linear(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else -x


class ReadsItsResult(Branching):
    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.max() > 0 else y


def test_auto_falls_back_to_fixed_lengths_where_torch_export_refuses():
    module = Padded()
    found = capture(interface(module, X), torch.float32)
    assert found.fixed_shapes
    assert (found.symbols, found.asserts, found.reads) == ({}, (), ())
    assert any("torch.export cannot capture Padded" in note for note in found.notes)
    assert set(found.weights.values()) == {"linear.weight", "linear.bias"}
    assert aten.linear.default in targets(found)
    torch.testing.assert_close(run(found, module, X + 1), module(X + 1))


def test_auto_does_not_fix_a_length_that_was_to_be_free():
    with pytest.raises(CaptureError, match=r"(?s)torch.export cannot capture Padded.*capture='dispatch' may do"):
        capture(interface(Padded(), X, dims=({0: Dim("S", min=1)},)), torch.float32)
    assert capture(interface(Padded(), X, dims=({0: Dim("S", min=1)},)), torch.float32, "dispatch").fixed_shapes


def test_what_torch_export_captures_keeps_free_lengths_in_auto():
    found = capture(interface(nn.Linear(4, 4), X, dims=({0: Dim("S", min=1)},)), torch.float32)
    assert not found.fixed_shapes
    assert list(found.symbols.values()) == ["S"]


def test_auto_refuses_a_module_that_looks_at_values_of_its_inputs_and_says_where():
    with pytest.raises(
        CaptureError, match=r"reads a tensor's value.*gave False at .*x.sum\(\) > 0.*capture='dispatch'"
    ):
        capture(interface(Branching(), X - 1), torch.float32)


def test_dispatch_accepts_that_and_keeps_what_was_asked():
    module = Branching()
    found = capture(interface(module, X + 1), torch.float32, "dispatch")
    (read,) = found.reads
    assert "gave True at test_trace_capture_dispatch.py:" in read
    assert "/" not in read.partition(":")[0]
    torch.testing.assert_close(run(found, module, X + 2), module(X + 2))


def test_examples_without_values_cannot_be_looked_at():
    with FakeTensorMode():
        example = torch.empty(3, 4)
    with pytest.raises(CaptureError, match="needs the values of a tensor that has only a shape"):
        capture(interface(Branching(), example), torch.float32, "dispatch")
    assert capture(interface(nn.Linear(4, 4), example), torch.float32, "dispatch").fixed_shapes


def test_values_that_a_weight_has_a_part_in_cannot_be_looked_at():
    with pytest.raises(CaptureError, match="needs the values of a tensor that has only a shape"):
        capture(interface(ReadsItsResult(), X), torch.float32, "dispatch")


class Draws(nn.Module):
    """Takes rows in an order drawn at random, and of those that a mask of ones selects."""

    def forward(self, x):
        places = torch.ones(x.shape[0]).nonzero()[:, 0]
        return x[places[torch.randperm(len(places))]]


def test_draws_and_what_values_select_are_constants_and_captures_are_alike():
    first, second = (capture(interface(Draws(), X), torch.float32, "dispatch") for _ in range(2))
    assert not any(target in (aten.randperm.default, aten.nonzero.default) for target in targets(first))
    assert [c.tolist() for c in first.constants.values()] == [c.tolist() for c in second.constants.values()]
    result = run(first, Draws(), X)
    assert sorted(result.tolist()) == sorted(X.tolist())


def test_no_byte_of_an_opaque_weight_is_read():
    module = Padded()
    module.linear = nn.Linear(32, 8, bias=False)
    module.linear.weight = nn.Parameter(QTensorTractScaleOnly.quantize(torch.randn(8, 32)), requires_grad=False)
    module.forward = lambda x: module.linear(x) + module.linear.weight.T[:1]
    weight, before = module.linear.weight, materialised_counts()
    found = capture(interface(module, torch.zeros(3, 32)), torch.float32, "dispatch")
    assert materialised_counts() == before
    assert module.linear.weight is weight
    assert list(found.weights.values()) == ["linear.weight"]
    assert all(isinstance(node.meta["val"], FakeTensor) for node in found.weights)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def test_writes_to_what_the_module_keeps_are_refused():
    module = Counting()
    with pytest.raises(CaptureError, match="changes 'count', which the module keeps"):
        capture(interface(module, X), torch.float32, "dispatch")
    assert module.count.tolist() == [0.0] * 4


def test_the_weights_may_be_of_another_dtype_than_the_example():
    module = Branching().to(torch.bfloat16)
    found = capture(interface(module, X.to(torch.bfloat16) + 1), torch.float32, "dispatch")
    assert {node.meta["val"].dtype for node in found.weights} == {torch.float32}
    assert found.outputs[0][0].meta["val"].dtype is torch.float32


class Mixing(nn.Module):
    def forward(self, a, b, c, d, e):
        return a - 2 * b + c * d - e


def test_many_inputs_that_are_alike_stay_apart():
    inputs = [X + at for at in range(5)]
    found = capture(interface(Mixing(), *inputs), torch.float32, "dispatch")
    torch.testing.assert_close(run(found, Mixing(), *inputs[::-1]), Mixing()(*inputs[::-1]))


def test_a_failed_torch_export_prints_no_graph(capfd):
    capture(interface(Padded(), X), torch.float32)
    assert "def forward" not in capfd.readouterr().err
