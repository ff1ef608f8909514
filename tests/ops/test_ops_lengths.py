"""What tract calculates by itself: lengths (halves, remainders), and tensors that are full of one number."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats
from torch import nn

pytestmark = pytest.mark.tract


def free(name, function, *, least=4, others=(4, 7, 9)):
    """One input [S, 3], traced at 6."""
    inputs = [(floats(length, 3, seed=length),) for length in others]
    return Case(name, function, (floats(6, 3),), {(0, 0): "S"}, inputs, least=least)


def half(x):
    return x[x.shape[0] // 2 :]


CASES = [
    # tract calculates S - S/2 as S/2, which is one less where S is odd.
    free("windows_of_second_half", lambda x: half(x).unfold(0, 2, 1)),
    free("last_of_second_half", lambda x: half(x)[-1] + x[0]),
    free("places_in_second_half", lambda x: half(x) * torch.arange(x.shape[0] - x.shape[0] // 2)[:, None]),
    free("second_half_in_a_row", lambda x: half(x).reshape(-1)[1:].cumsum(0)),
    free("from_the_half_on", lambda x: torch.arange(x.shape[0] // 2, x.shape[0]) + half(x)[:, 0].flip(0)),
    free("filled_second_half", lambda x: torch.cat([half(x), torch.ones(x.shape[0] - x.shape[0] // 2, 3)])),
    free("both_halves_less_one", lambda x: x[: x.shape[0] - x.shape[0] // 2 - 1].flip(0), least=4),
    # A remainder that is taken away.
    free("all_but_a_remainder", lambda x: x[: x.shape[0] - x.shape[0] % 3].reshape(-1, 9) * 2),
    free("all_but_an_odd_one", lambda x: x[: x.shape[0] - x.shape[0] % 2].reshape(-1, 6) * 2),
    free("one_more_when_odd", lambda x: torch.zeros(x.shape[0] + x.shape[0] % 2, 2) + x.sum()),
    # Further than the axis is long.
    free("rolled_back_further", lambda x: x.roll(-2, 0), least=1, others=(1, 2, 3, 7)),
    free("rolled_further", lambda x: x.roll((5, 1), (0, 1)), least=1, others=(1, 2, 4, 7)),
    free("rolled_by_one", lambda x: torch.cat([x.roll(1, 0), x.roll(-1, 0)], 1), least=1, others=(1, 2, 7)),
]

# Numbers that tract knows: of a product with ones, or a choice by them, it keeps the shape of the other operand.
N = torch.arange(12).reshape(2, 6) % 5


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.ones(1, 1, dtype=torch.long))

    def forward(self, x):
        ones = self.ones.expand(x.shape)
        return ones * 3, ones.float().mul(2).sum(1)


def known(name, function):
    """One input [B, S] of integers."""
    others = ((torch.arange(27).reshape(3, 9) % 7,), (torch.arange(4).reshape(1, 4),))
    return Case(name, function, (N,), {(0, 0): "B", (0, 1): "S"}, others)


CASES += [
    known("ones_as_floats", lambda x: (torch.ones_like(x).float() * 3).sum(1)),
    known("ones_by_column", lambda x: torch.ones_like(x) * x.sum(1, keepdim=True)),
    known("column_by_ones", lambda x: x.sum(1, keepdim=True) // torch.ones_like(x)),
    known("zeros_by_number", lambda x: torch.zeros_like(x) * 3),
    known("ones_by_ones", lambda x: torch.ones_like(x)[:, None] * torch.ones_like(x)[:, :, None]),
    known("floats_as_ones", lambda x: torch.ones(x.shape).long() * 3),
    known("chosen_by_ones", lambda x: torch.where(torch.ones_like(x).bool(), 1.0, 2.0)),
    known("true_and_column", lambda x: torch.ones(x.shape, dtype=torch.bool) & (x.sum(1)[:, None] > 3)),
    known("ones_of_a_buffer", Ones()),
    known("ones_of_a_constant", lambda x: torch.tensor([[1]]).expand(x.shape) * 3),
    known("ones_of_an_input", lambda x: (x * 0 + 1) * 3),
    known("zeros_of_floats", lambda x: (x.float() * 0).long() * 3),
    known("zeros_of_bits", lambda x: (x & 0) * 3),
    known("places_within", lambda x: (torch.arange(x.shape[1]) < x.shape[1]).float() * 2),
    known("even_places", lambda x: (torch.arange(x.shape[1]) * 2 % 2 == 0).float() * 2),
    known("places_of_zero", lambda x: (torch.arange(x.shape[1]) * 0 + 1) * 3),
]


def places(x):
    return torch.arange(x.shape[1])


def chosen(test):
    """A choice between a number and a column of all rows, by a test that says the same of all places."""
    return lambda x: torch.where(test(x), x.float().sum(1, keepdim=True), 2.0)


CASES += [
    known("where_within", lambda x: torch.where(places(x) < x.shape[1], 1.0, 2.0)),
    known("where_near", lambda x: torch.where(places(x)[:, None] - places(x)[None] < x.shape[1], 1.0, 2.0)),
    known("where_so_far", lambda x: torch.where(places(x)[:, None] + x.shape[1] > places(x)[None], 0.0, -1e9)),
    known("column_within", chosen(lambda x: places(x) < x.shape[1])),
    known("column_without", chosen(lambda x: places(x) >= x.shape[1])),
    known("column_at_the_end", chosen(lambda x: places(x) == x.shape[1])),
    known("column_not_at_the_end", chosen(lambda x: places(x) != x.shape[1])),
    known("column_of_bounded", chosen(lambda x: places(x).clamp(max=x.shape[1] - 1) < x.shape[1])),
    known("column_of_itself", chosen(lambda x: places(x) - places(x) <= 0)),
    known("column_of_the_next", chosen(lambda x: places(x) + 1 > places(x))),
    known("column_of_both", chosen(lambda x: torch.cat([places(x), places(x)])[: x.shape[1]] < x.shape[1])),
    known("column_of_bands", chosen(lambda x: (places(x) >= 0) & (places(x).float() < x.shape[1]))),
    # What tells places apart is written as it is.
    known("triangle", lambda x: torch.where(places(x)[:, None] >= places(x)[None], 0.0, -1e9)),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("lengths"))


def test_only_comparisons_that_may_say_one_thing_of_all_places_are_hidden(archives):
    texts = {name: (archives / name / "model" / "graph.nnef").read_text() for name in ("triangle", "column_within")}
    assert "gather" not in texts["triangle"]
    assert "gather" in texts["column_within"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
