"""Results written into tensors that are given become results that are copied into them."""

import pytest
import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError
from t2n_hf.trace import dispatch_trace
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.passes.outs import copy_outs
from t2n_hf.trace.passes.writes import replace_writes

X, Y = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 3, 12).reshape(3, 4)


def without_outs(function, *args):
    """What a function computes once its graph has neither `out=` nor writes."""
    module = dispatch_trace(function, args)
    assert copy_outs(module.graph).changed
    replace_writes(module.graph)
    module.graph.lint()
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert not any(getattr(call.target, "_schema", None) and call.target._schema.is_mutable for call in calls)
    return fx.Interpreter(module).run(*args)


def twice(x, y):
    z = torch.empty_like(x)
    torch.add(x, y, alpha=2, out=z)
    return torch.mul(z, y, out=z), z + 1


def part(x, y):
    z = torch.zeros(3, 9)
    torch.cat([x, y], 1, out=z[:, 1:])
    return z


def wider(x, y):
    z = torch.empty(3, 4, dtype=torch.float64)
    torch.sub(x, y, out=z)
    torch.exp(z[:, ::2], out=z[:, 1::2])
    return z


def grown(x, y):
    z = torch.empty(0)
    first = torch.matmul(x, y.T, out=z)
    return z + 1, first


def grown_in_another_type(x, y):
    z = torch.empty(0, dtype=torch.float64)
    torch.add(x, y, out=z)
    return z.sum(0)


def several(x, y):
    values, places = torch.empty(3, 2), torch.empty(3, 2, dtype=torch.long)
    found = torch.topk(x * y, 2, out=(values, places))
    return values, places, found.values * 2, found[1]


def made(x, y):
    z = torch.empty(4, dtype=torch.float64)
    torch.arange(4, out=z)
    torch.full((4,), 2.5, out=z[:4])
    return x + torch.linspace(0, 1, 4, out=z)


def of_a_type(x, y):
    z = torch.empty(3, dtype=torch.float64)
    torch.sum(x, 1, dtype=torch.float64, out=z)
    return torch.mean(y, 1, dtype=torch.float64, out=z[:3]) + z


def through_a_view(x, y):
    z = torch.zeros(9, 16)
    torch.kron(x, y, out=z)
    return z


RANDOM = ("bernoulli", "multinomial", "normal")
FUNCTIONS = [twice, part, wider, grown, grown_in_another_type, several, made, of_a_type, through_a_view]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_gives_the_same(function):
    with torch.no_grad():
        torch.testing.assert_close(without_outs(function, X, Y), function(X, Y))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_operators_of_torch_give_the_same_over_its_samples():
    from torch.testing._internal.common_methods_invocations import op_db

    done, left = set(), set()
    for info in op_db:
        if info.name in RANDOM or not info.supports_out or not info.supports_dtype(torch.float32, "cpu"):
            continue
        sample = next(iter(list(info.sample_inputs("cpu", torch.float32))), None)
        if sample is None or not isinstance(sample.input, torch.Tensor) or "out" in sample.kwargs:
            continue

        def function(x, info=info, sample=sample):
            like = info.op(x, *sample.args, **sample.kwargs)
            out = pytree.tree_map_only(torch.Tensor, torch.zeros_like, like)
            info.op(x, *sample.args, **sample.kwargs, out=tuple(out) if isinstance(out, tuple | list) else out)
            return pytree.tree_leaves(out)

        with torch.no_grad():
            try:
                expected, got = function(sample.input), without_outs(function, sample.input)
            except Exception:  # noqa: BLE001 - those that cannot be traced: counted
                left.add(info.name)
                continue
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda text, name=info.name: f"{name}: {text}")
        done.add(info.name)
    assert len(done) > 200
    assert len(left) < 40


def captured(function, **buffers):
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    module.forward = lambda x: function(module, x)
    interface = Interface(
        module=module,
        args=(X,),
        dynamic_shapes=({0: Dim("S", min=2)},),
        input_names=("x",),
        output_names=("y",),
        layers=(),
        weight_owner=module,
    )
    return capture(interface, torch.float32, "whole")


def test_free_lengths_stay_free():
    def function(_module, x):
        z = x.new_empty(x.shape[0], 8)
        torch.cat([x, x * 2], 1, out=z)
        return torch.sin(z, out=z)

    graph = captured(function).graph
    assert [node.target for node in graph.nodes if node.op == "call_function" and "out" in node.kwargs] == []
    result = next(iter(graph.output_node().all_input_nodes)).meta["val"]
    assert isinstance(result.shape[0], torch.SymInt)


def test_what_a_module_keeps_is_not_written_into():
    def function(module, x):
        return x + torch.add(module.kept, 1, out=module.kept)

    with pytest.raises(CaptureError, match="changes 'kept', which the module keeps from call to call"):
        captured(function, kept=torch.ones(4))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_tensor_that_gets_another_shape_while_it_has_elements_is_refused():
    def function(x):
        z = torch.zeros(2, 2)
        torch.add(x, 1, out=z)
        return z

    module = dispatch_trace(function, (X,))
    with pytest.raises(CaptureError, match=r"of shape \(2, 2\), the shape \(3, 4\), at .*test_trace_outs.py"):
        copy_outs(module.graph)
