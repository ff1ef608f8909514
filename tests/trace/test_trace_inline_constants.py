"""Tensors that a forward makes of numbers have one name, by pieces and as a whole."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface

S = Dim("S", min=1, max=64)


class Twist(nn.Module):
    """A layer that makes two tensors of numbers, beside an attribute that has the name of one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.constant_0 = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.inner(x)[:, [1, 0, 3, 2]] + x[:, torch.tensor([3, 2, 1, 0])] * self.constant_0


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Twist(), Twist()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_a_tensor_of_numbers_is_called_after_the_module_that_makes_it(mode):
    module = Stack().eval()
    interface = Interface(
        module=module,
        args=(torch.zeros(5, 4),),
        dynamic_shapes=({0: S},),
        input_names=("x",),
        output_names=("y",),
        layers=("layers",),
        weight_owner=module,
    )
    (piece,) = capture(interface, torch.float32, mode).pieces
    names = [piece.constant_names[node] for node in piece.constants]
    assert names == ["layers.0.constant_1", "layers.0.constant_2"]
    assert "constant_0" in piece.weights.values()
