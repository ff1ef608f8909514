"""Classes of a user's own may have any name: the graph's operators stay what they are."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf import export_nnef
from t2n_hf.nnef.names import OPERATORS

OPS = Path(__file__).parents[2] / "t2n_hf" / "ops"


def layer(name):
    def __init__(self):
        nn.Module.__init__(self)
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.softmax(x @ self.w, -1) + torch.relu(x)

    return type(name, (nn.Module,), {"__init__": __init__, "forward": forward})


class Layers(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        for one in self.layers:
            x = one(x)
        return x


@pytest.mark.tract
@pytest.mark.parametrize(
    "name", ["Softmax", "Add", "Variable", "Matmul", "External", "TractCoreCast", "tract_core_gather"]
)
def test_a_class_with_the_name_of_an_operator_is_a_fragment_of_another_name(tmp_path, name):
    torch.manual_seed(0)
    example, dims = (torch.randn(2, 5, 4),), ({0: Dim("B", max=64), 1: Dim("S", max=64)},)
    # The export is checked in tract.
    export_nnef(Layers(layer(name)), tmp_path / "out", example_args=example, dynamic_shapes=dims, format="dir")
    text = (tmp_path / "out/model/graph.nnef").read_text()
    fragments = re.findall(r"^fragment (\w+)\(", text, re.MULTILINE)
    (mine,) = [fragment for fragment in fragments if fragment != "tract_core_properties"]
    assert mine not in OPERATORS
    assert not mine.startswith("tract_")
    assert len(re.findall(rf"= {mine}\(", text)) == 3


def test_every_operator_that_emitters_write_is_known_by_its_name():
    written = set()
    for path in OPS.glob("*.py"):
        written |= set(re.findall(r"\b(?:call|call_many|unary|binary|reduce)\(\s*\"(\w+)\"", path.read_text()))
    assert {"softmax", "select", "matmul"} <= written
    assert {name for name in written if not name.startswith("tract_")} <= OPERATORS
