"""Parts of places and lengths, which tract takes for whole numbers when it sees where they come from."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

pytestmark = pytest.mark.tract

X = floats(5, 4)


def halves(x):
    return torch.arange(x.shape[0]) * 0.5


def part(x, rounded):
    return x * (halves(x) - rounded(halves(x)))[:, None]


def lengths(x, times=1):
    return torch.tensor([x.shape[0], 3 * x.shape[0], 4, 5]) * times // times


def one(name, function):
    return Case(name, function, (X,), {(0, 0): "S"}, ((floats(8, 4),), (floats(3, 4),)))


CASES = [
    one("floor", lambda x: part(x, torch.floor)),
    one("ceil", lambda x: part(x, torch.ceil)),
    one("trunc", lambda x: part(x, torch.trunc)),
    one("cast", lambda x: part(x, lambda places: places.long())),
    one("quotient", lambda x: x * (halves(x) - torch.arange(x.shape[0]) // 2)[:, None]),
    one("remainder", lambda x: x * torch.remainder(halves(x), 1.0)[:, None]),
    one("floor_of_f64", lambda x: part(x.double(), lambda places: torch.arange(x.shape[0]).double().mul(0.5).floor())),
    one("half_of_a_length", lambda x: x * (torch.tensor(x.shape[0]) * 0.5 - x.shape[0] // 2)),
    one("half_of_a_length_by_tensors", lambda x: x * (torch.tensor(x.shape[0]) / 2 - torch.tensor(x.shape[0]) // 2)),
    one("half_of_a_length_f64", lambda x: x.double() * (torch.tensor(x.shape[0]).double() * 0.5 - x.shape[0] // 2)),
    one("halves_of_several_lengths", lambda x: x * (lengths(x) * 0.5 - lengths(x, 2) // 2)),
    one("floor_of_a_length", lambda x: x * (lambda r: r - r.floor())(torch.ones(1) * x.shape[0] * 0.25)),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("rounded"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
