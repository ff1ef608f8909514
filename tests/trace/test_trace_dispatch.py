import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import OpOverload

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.trace import dispatch_trace

aten = torch.ops.aten
X, Y = torch.arange(12.0).reshape(3, 4), torch.linspace(-1, 1, 12).reshape(3, 4)


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


# How it is called


def test_the_result_is_called_as_the_function_was_and_gives_the_same_structure():
    def function(x, pair, *, scale, extra=None):
        return {"sum": pair[0] + x["a"] * scale, "rest": (extra, 3, [x["a"].T])}

    module = dispatch_trace(function, ({"a": X}, (Y, Y)), {"scale": 2, "extra": None})
    assert isinstance(module, fx.GraphModule)
    result = module({"a": Y}, (X, Y), extra=None, scale=2)
    expected = function({"a": Y}, (X, Y), scale=2)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_nodes_are_overloads_of_aten_with_fake_results_and_lines():
    module = dispatch_trace(lambda x: (x * 2).split([1, 2])[1], (X,))
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [type(node.target) is OpOverload for node in calls] == [True, True, False]  # the last one is getitem
    assert calls[-1].meta["val"].shape == (2, 4)
    assert "(x * 2).split" in calls[0].meta["stack_trace"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((X[:2], 2), {}), r"argument 'x' was torch.float32 \(3, 4\) in the trace, got torch.float32 \(2, 4\)"),
        (((X.double(), 2), {}), "got torch.float64"),
        (((X, 3), {}), "argument 'k' was 2 in the trace, got 3"),
        (((X, 2.0), {}), "argument 'k' was 2 in the trace, got 2.0"),
        (((X,), {"k": 2}), "the trace was made with"),
    ],
    ids=["shape", "dtype", "number", "type", "structure"],
)
def test_a_call_that_the_trace_does_not_hold_for_is_refused(arguments, text):
    module = dispatch_trace(lambda x, k: x * k, (X, 2))
    args, kwargs = arguments
    with pytest.raises(ConfigError, match=text):
        module(*args, **kwargs)


def test_a_single_tensor_in_place_of_the_arguments_is_refused():
    with pytest.raises(ConfigError, match="args is a Tensor; expected a tuple"):
        dispatch_trace(torch.sin, X)


def test_arguments_may_have_names_that_the_code_of_a_graph_uses():
    def function(input, device, *, inf):
        return input.to(device) * inf + torch.zeros(4, device=device)

    module = dispatch_trace(function, (X, "cpu"), {"inf": 2})
    assert torch.equal(module(Y, "cpu", inf=2), Y * 2)


def test_arguments_of_which_two_would_have_one_name_are_told_apart():
    def function(x, x_0, *rest, arg_2):
        return x[0] - 2 * x_0 + 3 * rest[0] - 4 * arg_2

    module = dispatch_trace(function, ([X, Y], X + 1, X + 2), {"arg_2": X + 3})
    arguments = ([Y, X], Y + 1, X * 2), {"arg_2": X * Y}
    assert torch.equal(module(*arguments[0], **arguments[1]), function(*arguments[0], **arguments[1]))


def test_copies_and_the_interpreter_run_it():
    module = dispatch_trace(lambda x, y: {"y": x @ y.T}, (X, Y))
    assert torch.equal(copy.deepcopy(module)(Y, X)["y"], Y @ X.T)
    assert torch.equal(fx.Interpreter(module).run(Y, X)["y"], Y @ X.T)


# What is recorded


def test_tensors_that_the_function_makes_are_recorded_not_kept():
    def function(x):
        total = torch.zeros(4)
        total[1:] += x[0, 1:]
        total[0] = x.sum()
        return total, torch.arange(3) + 1, torch.tensor([1.0, 2.0]).mul_(3)

    module = dispatch_trace(function, (X,))
    for _ in range(2):  # a literal is fresh in each run
        torch.testing.assert_close(module(Y), function(Y), rtol=0, atol=0)
    assert aten.zeros.default in targets(module)


def test_writes_through_views_reach_the_tensor():
    def function(x):
        y = x.clone()
        y.t()[0].mul_(2)
        y[1:].unsqueeze(0).add_(1)
        row = y.view(-1)[4:8]
        y.zero_()
        return y, row

    module = dispatch_trace(function, (X,))
    torch.testing.assert_close(module(Y), function(Y), rtol=0, atol=0)


def test_inputs_are_written_in_place_when_the_function_does_that_and_never_while_it_is_traced():
    def function(x):
        x[0].add_(1)
        return x.sum()

    x = X.clone()
    module = dispatch_trace(function, (x,))
    assert torch.equal(x, X)
    mine, theirs = Y.clone(), Y.clone()
    assert torch.equal(module(mine), function(theirs))
    assert torch.equal(mine, theirs)


def test_two_inputs_over_one_memory_see_each_others_writes():
    def function(x, y):
        x.add_(1)
        return y * 2

    x = X.clone()
    module = dispatch_trace(function, (x, x[1:]))
    assert torch.equal(x, X)
    mine, theirs = Y.clone(), Y.clone()
    assert torch.equal(module(mine, mine[1:]), function(theirs, theirs[1:]))


def test_an_input_as_out_argument_is_refused():
    with pytest.raises(CaptureError, match="an immutable tensor"):
        dispatch_trace(lambda x, y: torch.add(x, 1, out=y), (X, Y.clone()))


def test_gradients_are_part_of_the_graph():
    def function(x, y):
        x = x.detach().requires_grad_()
        loss = (torch.sin(x) * y).sum()
        return torch.autograd.grad(loss, x)[0]

    module = dispatch_trace(function, (X, Y))
    torch.testing.assert_close(module(Y, X), torch.cos(Y) * X)


def test_random_draws_follow_the_seed_of_the_call():
    def function(x):
        return F.dropout(x, 0.5, training=True) + torch.rand_like(x)

    module = dispatch_trace(function, (X,))
    torch.manual_seed(3)
    result = module(Y)
    torch.manual_seed(3)
    assert torch.equal(result, function(Y))


def test_operators_whose_result_nobody_uses_are_left_out():
    module = dispatch_trace(lambda x: (x.exp(), x * 2)[1], (X,))
    assert targets(module) == [aten.mul.Tensor]


def test_operators_that_call_functions_are_refused():
    with pytest.raises(CaptureError, match="calls functions of its own"):
        dispatch_trace(lambda x: torch.ops.higher_order.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)), (X,))


def test_a_trace_inside_of_a_trace_has_a_graph_of_its_own():
    graphs = []

    def function(x):
        inner = dispatch_trace(lambda y: y * 2 + torch.ones(4), (x,))
        graphs.append(inner)
        return inner(x).exp()

    module = dispatch_trace(function, (X,))
    assert targets(graphs[0]) == [aten.mul.Tensor, aten.ones.default, aten.add.Tensor]
    assert targets(module) == [*targets(graphs[0]), aten.exp.default]
    assert torch.equal(module(Y), (Y * 2 + 1).exp())
    with pytest.raises(CaptureError, match="belongs to another trace"):
        dispatch_trace(lambda x: dispatch_trace(lambda y: y + x, (X,))(x), (X,))


def test_a_generator_of_the_functions_own_is_refused():
    with pytest.raises(CaptureError, match=r"a torch.Generator, which a graph cannot hold; seed torch's own"):
        dispatch_trace(lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(3)), (X,))


def test_results_that_are_no_pytree_are_refused():
    class Box:
        def __init__(self, value):
            self.value = value

    with pytest.raises(CaptureError, match="returns a Box"):
        dispatch_trace(Box, (X,))


def test_a_tensor_that_the_function_kept_cannot_be_used_after_the_trace():
    kept = []
    dispatch_trace(lambda x: kept.append(x * 2) or x + 1, (X,))
    with pytest.raises(CaptureError, match="whose trace has ended"):
        kept[0] + 1


# Values that the function looks at


def test_it_is_told_where_the_function_looked_at_values_of_its_inputs():
    def function(x):
        return x * 2 if x.sum() > 0 else x[x > 0.5]

    module = dispatch_trace(function, (X,))
    (read,) = module.meta["reads"]
    assert (read.op, read.result) == ("aten._local_scalar_dense.default", "True")
    assert read.file == __file__
    assert read.code == "return x * 2 if x.sum() > 0 else x[x > 0.5]"
    assert str(read).startswith(f"{read.op} gave True at test_trace_dispatch.py:{read.line}: return")
    reads = dispatch_trace(function, (-X.abs(),)).meta["reads"]
    assert [read.op for read in reads] == ["aten._local_scalar_dense.default", "aten.index.Tensor"]


def test_values_that_depend_on_no_input_are_looked_at_freely():
    def function(x):
        steps = torch.arange(3)
        assert steps.sum().item() == 3
        assert torch.zeros(2).tolist() == [0.0, 0.0]
        return x * steps.max().item()

    module = dispatch_trace(function, (X,))
    assert module.meta["reads"] == ()
    assert torch.equal(module(Y), Y * 2)


def test_a_value_that_was_written_from_an_input_depends_on_it():
    def function(x):
        buffer = torch.zeros(2, 4)
        buffer[1].copy_(x[0])
        return x + buffer.sum().item()

    assert len(dispatch_trace(function, (X,)).meta["reads"]) == 1


def test_a_tensor_of_places_may_say_where_to_split():
    def function(x, places):
        return torch.tensor_split(x, places)

    module = dispatch_trace(function, (X, torch.tensor([1, 2])))
    torch.testing.assert_close(module(Y, torch.tensor([1, 2])), function(Y, torch.tensor([1, 2])))
    assert len(module.meta["reads"]) == 1


# Modules


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.arange(5.0), persistent=False)
        self.scale = torch.tensor(2.0)

    def forward(self, ids):
        self.seen = self.norm(self.table(ids))
        return self.head(self.seen) * self.scale + self.steps


IDS = torch.tensor([0, 2, 4])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_module_keeps_its_parameters_by_name_and_each_is_one_leaf(mode):
    torch.manual_seed(0)
    model = Tied().eval()
    with mode():
        module = dispatch_trace(model, (IDS,))
        assert torch.equal(module(IDS.flip(0)), model(IDS.flip(0)))
    named = dict(model.named_parameters())
    assert {name: parameter is named[name] for name, parameter in module.named_parameters()} == dict.fromkeys(
        named, True
    )
    leaves = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    assert leaves.count("table.weight") == 1
    assert "head.weight" not in leaves


def test_a_module_is_left_as_it_was():
    torch.manual_seed(0)
    model = Tied().train()
    before = copy.deepcopy(model.state_dict())
    attributes = set(vars(model))
    module = dispatch_trace(model, (IDS,))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert set(vars(model)) == attributes
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    module(IDS)
    twin = copy.deepcopy(model)
    twin.load_state_dict(before)
    twin(IDS)
    torch.testing.assert_close(module.norm.running_mean, twin.norm.running_mean)


def test_nodes_know_the_modules_they_come_from():
    module = dispatch_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,))
    last = [node for node in module.graph.nodes if node.op == "call_function"][-1]
    assert list(last.meta["nn_module_stack"].values()) == [("", nn.Sequential), ("1", nn.ReLU)]


def test_parameters_that_a_function_encloses_are_one_leaf_each():
    linear = nn.Linear(4, 4)
    with torch.inference_mode():
        module = dispatch_trace(lambda x: linear(linear(x)), (X,))
        assert torch.equal(module(Y), linear(linear(Y)))
    leaves = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    assert leaves == ["_param_constant0", "_param_constant1"]
    assert module._param_constant0 is linear.weight


VIEWS = {
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(-1),
    "select": lambda t: t[0],
    "unbind": lambda t: t.unbind(0)[1],
    "split": lambda t: t.split(1)[0],
    "expand": lambda t: t.expand(2, *t.shape),
    "alias": torch.ops.aten.alias.default,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_tensor_that_no_module_registers_are_recorded_in_inference_mode(view):
    table = torch.randn(3, 3)
    function = lambda x: x.sum() + VIEWS[view](table)  # noqa: E731
    with torch.inference_mode():
        module = dispatch_trace(function, (X,))
        assert torch.equal(module(Y), function(Y))
    assert [node.target for node in module.graph.nodes if node.op == "get_attr"] == ["_tensor_constant0"]


def test_recurrent_layers_hold_their_parameters_in_a_list_beside_and_are_traced():
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, batch_first=True)
    with torch.no_grad():
        module = dispatch_trace(model, (X[None],))
        torch.testing.assert_close(module(Y[None])[0], model(Y[None])[0])
    assert set(dict(module.named_parameters())) == set(dict(model.named_parameters()))


class Moving(nn.Module):
    """As CTRL: in inference mode `to` is an operator, also where there is nothing to move or cast."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(3.0))

    def forward(self, x):
        self.places = self.places.to(device=x.device, dtype=x.dtype)
        return x * self.places


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_is_moved_to_where_it_is_stays_itself(mode):
    module, x = Moving(), torch.randn(2, 3)
    places = module.places
    with mode():
        traced = dispatch_trace(module, (x,))
        torch.testing.assert_close(traced(x), x * torch.arange(3.0))
    assert module.places is places


class Rebinding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state = self.state + x[0]
        return self.state * 1


def test_a_buffer_that_is_replaced_is_refused():
    model = Rebinding()
    state = model.state
    with pytest.raises(CaptureError, match="replaces buffer 'state'"):
        dispatch_trace(model, (X,))
    assert model.state is state
