"""Lengths that a module puts into tensors stay lengths of the graph."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.export.module_interface import module_interface
from t2n_hf.trace.capture import capture
from t2n_hf.trace.tensor_lengths import TensorLengthsKept


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        span = torch.tensor(x.shape[1])
        return x[:, 2 : span - 1] + x[:, 1 : -1 * (3 - 1) + span] + torch.arange(60.0)[30 - span : 27]


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[1], 4, rounding_mode="trunc")
        whole = x[:, : count * 4]
        return whole.view(x.shape[0], count, 4) + x.new_zeros((x.shape[0], count, 4)) + (count + 1).long().item()


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(x.shape[1]).to(torch.int64)
        return x * count.item() + torch.arange(count.item()).clamp(0, count - 2)


@pytest.mark.parametrize("module", [Slices(), Chunks(), Reads()], ids=lambda module: type(module).__name__)
def test_a_module_is_captured_with_a_free_length(module: nn.Module) -> None:
    with TensorLengthsKept():
        exported = torch.export.export(module, (torch.randn(2, 9),), dynamic_shapes=({1: Dim.DYNAMIC},), strict=False)
    assert not any(node.target is torch.ops.aten.item.default for node in exported.graph.nodes)
    for length in (10, 13, 27):
        x = torch.randn(2, length)
        torch.testing.assert_close(exported.module()(x), module(x))


def test_values_of_tensors_that_are_no_lengths_are_left_alone() -> None:
    with TensorLengthsKept():
        mask = torch.tensor([1, 0, 2])
        assert int(mask.sum()) == 3
        assert torch.stack([torch.tensor(3), torch.tensor(4)]).tolist() == [3, 4]
        assert torch.div(torch.tensor(7), torch.tensor(2), rounding_mode="trunc").item() == 3
        assert torch.div(torch.tensor(-7), 2, rounding_mode="floor").item() == -4
        assert torch.arange(5)[torch.tensor(1) : torch.tensor(4)].tolist() == [1, 2, 3]


def test_captures_keep_lengths_that_a_module_puts_into_tensors() -> None:
    interface = module_interface(Slices(), args=(torch.randn(2, 9),), dynamic_shapes=({1: Dim("L", min=6, max=29)},))
    captured = capture(interface, torch.float32)
    (result, _), *_ = captured.outputs
    assert str(result.meta["val"].shape[1].node.expr.free_symbols) == str(set(captured.symbols))
    assert captured.notes == ()
