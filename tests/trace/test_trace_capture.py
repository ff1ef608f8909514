import models
import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.hf.tasks import interface_of
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.pieces import LAYER_OP

aten = torch.ops.aten


class Scale(nn.Module):
    """A layer with a switch, a stored factor and its place in the model."""

    def __init__(self, layer_idx, width=4, power=1):
        super().__init__()
        self.layer_idx = layer_idx
        self.power = power
        self.linear = nn.Linear(4, width)
        self.back = nn.Linear(width, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x, *, shift=0, store=None):
        y = self.back(self.linear(x)) ** self.power * self.table + shift
        if store is not None:
            store[self.layer_idx] = store[self.layer_idx] + y
        return y


class Stack(nn.Module):
    def __init__(self, *layers, **call):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = call

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, **self.call)
        return x


class Storing(Stack):
    """Each layer adds to its own tensor of a list."""

    def forward(self, x, store):
        for layer in self.layers:
            x = layer(x, store=store)
        return x, store


ROWS = (torch.zeros(3, 4),)
FREE = ({0: Dim("S", min=1)},)


def interface(module, args=ROWS, outputs=("y",), dims=FREE, layers=("layers",)):
    count = len(torch.utils._pytree.tree_leaves(args))
    return Interface(
        module=module.eval(),
        args=args,
        dynamic_shapes=dims,
        input_names=tuple(f"x{i}" for i in range(count)),
        output_names=outputs,
        layers=layers,
        weight_owner=module,
    )


def captured(module, mode="pieces", **options):
    return capture(interface(module, **options), torch.float32, mode)


def calls(result):
    return [node for node in result.graph.nodes if node.target is LAYER_OP]


def test_equal_layers_are_one_piece_and_called_once_each():
    result = captured(Stack(*(Scale(i) for i in range(5))))
    assert [piece.name for piece in result.pieces] == ["scale"]
    assert [call.prefix for call in result.calls.values()] == [f"layers.{i}." for i in range(5)]
    assert len(calls(result)) == 5
    piece = result.pieces[0]
    assert sorted(piece.weights.values()) == ["back.bias", "back.weight", "linear.bias", "linear.weight"]
    assert [name for _, name in piece.inputs] == ["x"]
    assert [name for _, name in piece.outputs] == ["output"]
    assert list(result.symbols.values()) == ["S"]


@pytest.mark.parametrize(
    "other",
    [lambda: Scale(1, width=8), lambda: Scale(1, power=2), lambda: Scale(1).double()],
    ids=["shapes", "scalar", "dtype of a buffer"],
)
def test_layers_that_differ_are_different_pieces(other):
    assert len(captured(Stack(Scale(0), other())).pieces) == 2


def test_layers_whose_buffers_hold_other_values_are_different_pieces():
    changed = Scale(1)
    changed.table.mul_(2)
    result = captured(Stack(Scale(0), changed, Scale(2)))
    assert [call.piece for call in result.calls.values()] == [0, 1, 0]
    tables = [value for piece in result.pieces for value in piece.constants.values()]
    assert torch.equal(tables[0] * 2, tables[1])


def test_layers_with_tied_weights_inside_are_different_pieces():
    tied = Scale(1)
    tied.back.weight = tied.linear.weight
    assert len(captured(Stack(Scale(0), tied)).pieces) == 2


def test_arguments_that_are_no_tensors_make_different_pieces():
    class Shifting(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = layer(x, shift=number % 2)
            return x

    result = captured(Shifting(*(Scale(i) for i in range(4))))
    assert [call.piece for call in result.calls.values()] == [0, 1, 0, 1]


def test_tensors_that_a_layer_replaces_in_a_container_are_results_of_its_piece():
    module = Storing(*(Scale(i) for i in range(3)))
    store = [torch.zeros(3, 4) for _ in range(3)]
    dims = ({0: Dim("S", min=1)}, [{0: Dim("S", min=1)}] * 3)
    outputs = ("y", "s0", "s1", "s2")
    result = captured(module, args=(torch.zeros(3, 4), store), outputs=outputs, dims=dims)
    assert len(result.pieces) == 1
    assert [name for _, name in result.pieces[0].inputs] == ["x", "store_0"]
    assert [name for _, name in result.pieces[0].outputs] == ["output", "store_0_out"]
    inputs = [node for node, _ in result.inputs]
    assert [call.args[1][1] for call in calls(result)] == inputs[1:]


def test_a_layer_with_effects_that_its_results_do_not_show_is_captured_whole():
    class Writing(Scale):
        def forward(self, x):
            return x.add_(1)

    module = Stack(Writing(0), Writing(1))
    with pytest.raises(CaptureError, match="in place"):
        captured(module)
    result = captured(module, mode="auto")
    assert "in place" in result.notes[0]
    assert [call.piece for call in result.calls.values()] == [0, 0]


def test_an_argument_that_cannot_be_compared_is_named():
    with pytest.raises(CaptureError, match="not a pytree"):
        captured(Stack(Scale(0), Scale(1), shift=Dim))


def test_whole_capture_without_lists_of_layers_has_no_pieces():
    result = captured(Stack(Scale(0), Scale(1)), mode="whole", layers=())
    assert not result.pieces
    assert not calls(result)
    assert len(result.weights) == 8


def state_of(model):
    return {
        name: (id(tensor), tensor.dtype)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_the_model_is_as_it_was_afterwards(mode):
    model = models.m1().train()
    before, modules = state_of(model), [id(module) for module in model.modules()]
    result = capture(interface_of(model), torch.float16, mode)
    assert state_of(model) == before
    assert [id(module) for module in model.modules()] == modules
    assert all(module.training for module in model.modules())
    assert {node.meta["val"].dtype for node in result.weights} == {torch.float16}


def test_the_model_is_as_it_was_after_a_failure():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Scale(0)])

        def forward(self, x):
            self.layers[0](x)
            raise RuntimeError("no")

    module = Failing()
    before = state_of(module)
    with pytest.raises(CaptureError, match="no"):
        captured(module)
    assert state_of(module) == before
    assert type(module.layers[0]) is Scale


def test_no_weight_is_read_whatever_its_class():
    model = models.m1()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            packed = QTensorTractScaleOnly.quantize(module.weight.detach())
            module.weight = nn.Parameter(packed, requires_grad=False)
    plain = capture(interface_of(models.m1()), torch.float32)
    result = capture(interface_of(model), torch.float32)
    names = [[node.name for node in graph.graph.nodes] for graph in (result, *result.pieces)]
    assert names == [[node.name for node in graph.graph.nodes] for graph in (plain, *plain.pieces)]


def test_lengths_of_all_caches_are_one_symbol():
    result = capture(interface_of(models.m3()), torch.float32)
    assert sorted(result.symbols.values()) == ["P", "S"]
    past = [node.meta["val"].shape[2].node.expr for node, name in result.inputs if name != "input_ids"]
    assert len(set(past)) == 1


def test_constants_keep_their_values():
    model = models.m1()
    want = model.model.rotary_emb.inv_freq.clone()
    result = capture(interface_of(model), torch.float32)
    (value,) = result.constants.values()
    assert torch.equal(value, want)


def test_a_buffer_without_values_is_refused_by_name():
    module = Stack(Scale(0))
    module.layers[0].table = torch.ones(4, device="meta")
    with pytest.raises(CaptureError, match=r"layers\.0\.table"):
        captured(module)


def test_a_length_that_the_module_fixes_is_an_error_that_says_so():
    class Fixed(nn.Module):
        def forward(self, x):
            return x if x.shape[0] == 3 else x + 1

    with pytest.raises(CaptureError, match="specialized"):
        captured(Fixed(), layers=())


def test_a_module_that_returns_another_number_of_tensors_is_refused():
    with pytest.raises(CaptureError, match="returns 1 tensors, the interface names 2"):
        captured(Stack(Scale(0)), outputs=("a", "b"))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="expected one of auto, pieces, whole"):
        captured(Stack(Scale(0)), mode="half")


class Numbered(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.layer_idx = layer_idx

    def forward(self, x):
        return self.linear(x) + self.layer_idx


def test_a_layer_that_counts_with_its_number_is_a_piece_of_its_own():
    assert [call.piece for call in captured(Stack(*(Numbered(i) for i in (1, 1, 2)))).calls.values()] == [0, 0, 1]


def test_hooks_of_layers_run_in_the_graph_of_the_model():
    def adding(amount):
        return lambda module, args, output: output + amount

    model = Stack(*(nn.Linear(4, 4) for _ in range(4)))
    for layer, amount in zip(model.layers, (1, 1, 2), strict=False):
        layer.register_forward_hook(adding(amount))
    found = captured(model)
    assert [call.piece for call in found.calls.values()] == [0, 0, 0, 0]
    added = [node.args[1] for node in found.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert added == [1, 1, 2]


def test_a_weight_of_a_layer_that_the_model_reads_itself_is_captured_whole():
    class Reading(Stack):
        def forward(self, x):
            return super().forward(x) @ self.layers[0].weight

    result = captured(Reading(nn.Linear(4, 4), nn.Linear(4, 4)), mode="auto")
    assert [call.prefix for call in result.calls.values()] == ["layers.0.", "layers.1."]
    assert list(result.weights.values()) == ["layers.0.weight"]


class Counting(nn.Module):
    """Keeps what it has seen in a buffer; `write` says how."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, 4))
        self.write = write

    def forward(self, x):
        self.write(self, x)
        return x + self.seen


@pytest.mark.parametrize(
    "write",
    [
        lambda self, x: self.seen.add_(1),
        lambda self, x: self.seen[0].copy_(x[0]),
        lambda self, x: setattr(self, "seen", self.seen + x),
    ],
    ids=["in place", "through a view", "by assignment"],
)
@pytest.mark.parametrize("as_layer", [False, True], ids=["model", "layer"])
def test_a_buffer_that_changes_from_call_to_call_is_refused_by_name(write, as_layer):
    module = Stack(Counting(write)) if as_layer else Counting(write)
    name = "layers.0.seen" if as_layer else "seen"
    with pytest.raises(CaptureError, match=f"'{name}', which the module keeps from call to call"):
        captured(module, mode="auto", dims=({},), layers=("layers",) if as_layer else ())


def test_the_hooks_that_transformers_leaves_behind_make_no_difference():
    model = models.m1()
    model.generate(models.prompt(), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert model.model.layers[0]._forward_hooks
    assert len(capture(interface_of(model), torch.float32, "pieces").pieces) == 1


PARTS = [lambda whole: whole.chunk(2, -1)[0], lambda whole: nn.functional.dropout(whole, 0.5, training=False)]


class Writes(nn.Module):
    """Writes into a part of what it is given, or of what it keeps."""

    def __init__(self, part, is_kept):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.part, self.is_kept = part, is_kept

    def forward(self, x):
        self.part(self.kept if self.is_kept else x).add_(1)
        return x * 2


@pytest.mark.parametrize("part", PARTS, ids=["chunk", "dropout"])
def test_a_layer_that_writes_into_a_part_of_its_input_is_no_piece(part):
    with pytest.raises(CaptureError, match="changes a tensor in place that comes from outside"):
        capture(interface(Stack(Writes(part, False), Writes(part, False))), torch.float32, "pieces")


@pytest.mark.parametrize("part", PARTS, ids=["chunk", "dropout"])
def test_a_write_into_a_part_of_what_a_module_keeps_is_refused(part):
    with pytest.raises(CaptureError, match="'kept'"):
        capture(interface(Writes(part, True), layers=()), torch.float32, "whole")
