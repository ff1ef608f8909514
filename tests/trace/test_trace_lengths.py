"""Lengths that torch.export's solver gives up on are tried, and those at which the graph does not hold are refused."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.trace.lengths import export_with_lengths


class Windows(nn.Module):
    """Two strided windows, and a branch on how many results there are: the solver asks for multiples of the strides."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 4, 10, stride=5), nn.Conv1d(4, 4, 3, stride=2)
        self.at_least = at_least

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        features = self.second(self.first(tensors[0]))
        count = features.shape[-1]
        return features * 2 if count * count > self.at_least else features


def test_lengths_that_the_solver_gives_up_on_are_captured_as_they_are_named() -> None:
    module = Windows(at_least=4)
    exported = export_with_lengths(module, [torch.randn(1, 1, 100)], [{2: Dim("L", min=60)}])
    for length in (61, 77, 200):
        wave = torch.randn(1, 1, length)
        torch.testing.assert_close(exported.module()([wave]), module([wave]))


def test_a_length_at_which_the_module_takes_another_way_is_refused_with_the_length() -> None:
    with pytest.raises(CaptureError, match=r"captured at L=100 does not hold at L=20: .* is false"):
        export_with_lengths(Windows(at_least=4), [torch.randn(1, 1, 100)], [{2: Dim("L", min=20)}])


def test_a_branch_far_beyond_the_example_is_found() -> None:
    class Switch(nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
            count = (tensors[0].shape[0] - 3) // 4
            return tensors[0] * 2 if count * count < 1_000_000 else tensors[0]

    with pytest.raises(CaptureError, match=r"does not hold at N="):
        export_with_lengths(Switch(), [torch.randn(50)], [{0: Dim("N", min=8)}])


def test_two_lengths_that_must_stand_in_a_relation_are_refused_together() -> None:
    class Fits(nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
            short, long = tensors[0].shape[0] // 2, tensors[1].shape[0] // 2
            return tensors[0].sum() if short * short < long * long else tensors[1].sum()

    dims = [{0: Dim("A", min=4, max=64)}, {0: Dim("B", min=4, max=64)}]
    with pytest.raises(CaptureError, match=r"does not hold at A=\d+, B=\d+"):
        export_with_lengths(Fits(), [torch.randn(8), torch.randn(32)], dims)


def test_a_table_for_the_longest_context_may_be_taken_whole() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(64, 64).tril())

        def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
            new, total = tensors[0].shape[0], tensors[0].shape[0] + tensors[1].shape[0]
            return self.table[total - new : total, :total]

    module, dims = Past(), [{0: Dim("S", min=1, max=64)}, {0: Dim("P", min=0, max=63)}]
    exported = export_with_lengths(module, [torch.randn(5), torch.randn(6)], dims, ["S+P < 65"])
    for new, past in ((4, 60), (62, 2), (3, 9)):
        inputs = [torch.randn(new), torch.randn(past)]
        assert torch.equal(exported.module(check_guards=False)(inputs), module(inputs))


def test_a_length_that_is_fixed_is_said_by_torch_itself() -> None:
    class Fixed(nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
            return tensors[0] + torch.ones(12)

    with pytest.raises(Exception, match="12"):
        export_with_lengths(Fixed(), [torch.randn(12)], [{0: Dim("N", min=2)}])
