"""A capture of every layer finds by itself what pieces take for granted: which layers are the same."""

import models
import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.hf.tasks import interface_of
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.pieces import LAYER_OP
from t2n_hf.trace.same_graph import describe_piece

S = Dim("S", min=1)


class Block(nn.Module):
    def __init__(self, factor=1.0, shared=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor
        self.shared = shared
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x, bias):
        x = x + bias if self.shared is None else self.shared(x)
        return self.linear(x) * self.factor * self.table


class Blocks(nn.Module):
    def __init__(self, *blocks, write=False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.write = write

    def forward(self, x):
        bias = x.mean(0)
        for block in self.blocks:
            y = block(x, bias)
            if self.write:
                y += 1
            x = y
        return x


def whole(module, mode="whole"):
    interface = Interface(
        module=module.eval(),
        args=(torch.zeros(3, 4),),
        dynamic_shapes=({0: S},),
        input_names=("x",),
        output_names=("y",),
        layers=("blocks",),
        weight_owner=module,
    )
    return capture(interface, torch.float32, mode)


def numbers(captured):
    return [call.piece for call in captured.calls.values()]


def test_layers_with_the_same_graph_are_one_piece_with_names_from_their_call():
    captured = whole(Blocks(Block(), Block(), Block(), write=True))
    assert numbers(captured) == [0, 0, 0]
    (piece,) = captured.pieces
    assert (piece.name, piece.where) == ("block", "blocks.0")
    assert [name for _, name in piece.inputs] == ["x", "bias"]
    assert [name for _, name in piece.outputs] == ["output"]
    assert sorted(piece.weights.values()) == ["linear.bias", "linear.weight"]
    assert [call.prefix for call in captured.calls.values()] == ["blocks.0.", "blocks.1.", "blocks.2."]
    assert captured.notes == ()


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_layers_that_compute_something_else_are_not_the_same(mode):
    other = Block()
    other.table.mul_(2)
    captured = whole(Blocks(Block(), Block(2.0), Block(), other), mode)
    assert numbers(captured) == [0, 1, 0, 2]


class Telling(nn.Module):
    """Its layers leave something behind that is no result of theirs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        for block in self.blocks:
            block.register_forward_pre_hook(self.look)

    def look(self, block, args):
        self.seen.append(args[0] * 2)

    def forward(self, x):
        self.seen = []
        for block in self.blocks:
            x = block(x)
        seen, self.seen = self.seen, []
        return x + sum(seen)


def test_what_a_layer_leaves_behind_has_a_name_of_its_own():
    captured = whole(Telling())
    assert [[name for _, name in piece.outputs] for piece in captured.pieces] == [["output", "output_0"]]


def test_a_weight_that_layers_share_is_given_to_them():
    shared = nn.Linear(4, 4)
    captured = whole(Blocks(Block(), Block(shared=shared), Block(shared=shared)))
    assert numbers(captured)[0] == 0
    names = [[name for _, name in piece.inputs] for piece in captured.pieces]
    assert any(len(inputs) > 1 for inputs in names[1:])
    held = {name for piece in captured.pieces for name in piece.weights.values()}
    assert "linear.weight" in held


def test_no_part_of_a_layer_stays_outside():
    captured = whole(Blocks(Block(), Block()))
    inside = [node for node in captured.graph.nodes if "blocks" in str(node.meta.get("nn_module_stack", ""))]
    kinds = {node.target for node in inside if isinstance(node.meta.get("val"), torch.Tensor)}
    assert torch.ops.aten.linear.default not in kinds
    assert len([node for node in captured.graph.nodes if node.target is LAYER_OP]) == 2


MODELS = {
    "llama": models.m1,
    "qwen3": models.m3,
    "mixtral": models.m4,
    "qwen3 moe": models.m4_qwen3,
    "gemma3": models.m5,
    "gpt2": models.m10,
    "dense and sparse": lambda: models.m4_qwen3(num_hidden_layers=4, mlp_only_layers=[0, 2]),
}


SOON = ("llama", "gemma3", "dense and sparse")


@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_pieces_are_what_a_capture_of_every_layer_shows(name):
    face = interface_of(MODELS[name]())
    pieces, every = (capture(face, torch.float32, mode) for mode in ("pieces", "whole"))
    assert [describe_piece(piece) for piece in pieces.pieces] == [describe_piece(piece) for piece in every.pieces]
    assert pieces.calls == every.calls
    names = [[[name for _, name in side] for side in (p.inputs, p.outputs)] for p in pieces.pieces]
    assert names == [[[name for _, name in side] for side in (p.inputs, p.outputs)] for p in every.pieces]


def lying(layer_idx):
    """A layer of a kind that looks the same as others and is not."""

    class Lying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.box = BOX

        def forward(self, x, bias):
            self.box.count += 1
            return self.linear(x) + bias * self.box.count

    return Lying


class Box:
    count = 0


BOX = Box()


def test_the_second_layer_of_a_kind_is_traced_too_and_seen_to_differ():
    kind = lying(0)
    captured = whole(Blocks(kind(), kind()), "pieces")
    assert numbers(captured) == [0, 1]
