"""Lengths that are calculated: halves, remainders and places, at odd lengths and at short ones."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

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


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("lengths"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
