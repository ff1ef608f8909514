"""Forms that tract cannot load beside block weights, and that are written in other ways."""

import numpy as np
import pytest
import torch
from lowering_cases import archive, dequantize
from torch import nn
from torch.export import Dim

from t2n_hf.export.lower import WeightFormatInfo
from t2n_hf.trace.interface import Interface
from t2n_hf.tract.runner import TractRunner

Q4 = WeightFormatInfo("q4_0")
FREE = {0: Dim("B", min=1, max=64), 1: Dim("S", min=1, max=64)}


def interface(module, example):
    return Interface(
        module=module.eval(),
        args=(example,),
        dynamic_shapes=(FREE,),
        input_names=("x",),
        output_names=("y",),
        weight_owner=module,
    )


def run(folder, x):
    with TractRunner(folder) as runner:
        return runner.run({"x": x.numpy()})["y"]


class Parts(nn.Module):
    """Parts of rows that were looked up: tract moves slices up to where they are, and panics there."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.part = nn.Embedding(8, 32), nn.LayerNorm(32), part

    def forward(self, x):
        return self.part(self.table(x), self.norm)


@pytest.mark.tract
@pytest.mark.parametrize(
    "part",
    [
        lambda rows, norm: rows[..., :16],
        lambda rows, norm: rows[:, 1:],
        lambda rows, norm: norm(rows)[:, -1],
        lambda rows, norm: torch.tanh(rows + 1)[..., 3],
        lambda rows, norm: torch.cat([rows * part for part in rows.chunk(4, -1)[1].split(1, -1)], -1),
    ],
    ids=["columns", "rows", "last", "one", "split"],
)
def test_parts_of_rows_of_a_block_weight_equal_pytorch(part, tmp_path):
    module, x = Parts(part), torch.tensor([[3, 1, 4, 7], [0, 2, 2, 5]])
    formats = {"table.weight": Q4}
    folder, _ = archive(interface(module, x), tmp_path / "parts", formats)
    dequantize(module, formats)
    for given in (x, torch.flip(x, (0, 1))[:1, :3]):
        np.testing.assert_allclose(run(folder, given), module(given).detach().numpy(), rtol=1e-5, atol=1e-5)


class Joined(nn.Module):
    """Joins times a block weight, which tract would cut where they were joined."""

    def __init__(self, join):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.join = nn.Linear(64, 32), join

    def forward(self, x):
        return self.linear(self.join(x))


@pytest.mark.tract
@pytest.mark.parametrize(
    "join",
    [
        lambda x: torch.cat([x, x.sin()], -1),
        lambda x: torch.cat([x[:, 0], x[:, 1]], -1),
        lambda x: torch.stack([x, x + 1], -1).flatten(-2),
        lambda x: torch.cat([x[..., :31], x, x[..., :1]], -1),
    ],
    ids=["features", "places", "in_turn", "odd"],
)
def test_joins_times_a_block_weight_equal_pytorch(join, tmp_path):
    module, x = Joined(join), torch.randn(2, 4, 32)
    formats = {"linear.weight": Q4}
    folder, result = archive(interface(module, x), tmp_path / "joined", formats)
    assert result.bindings[0].format == "q4_0"
    dequantize(module, formats)
    for given in (x, x[:1, :3]):
        np.testing.assert_allclose(run(folder, given), module(given).detach().numpy(), rtol=1e-3, atol=1e-3)
