"""Numbers that a forward calculates in floats from lengths."""

import math

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

pytestmark = pytest.mark.tract

X = floats(5, 4)
OTHERS = tuple((floats(length, 4),) for length in (3, 4, 7, 12, 50))


def one(name, function, **options):
    return Case(name, function, (X,), {(0, 0): "S"}, OTHERS, **options)


CASES = [
    one("half", lambda x: x * (0.5 * x.shape[0] - x.shape[0] // 2)),
    one("third", lambda x: x * (x.shape[0] / 3 - x.shape[0] // 3)),
    one("power", lambda x: x * x.shape[0] ** -0.5),
    one("root", lambda x: x / torch.sym_sqrt(x.shape[0])),
    one("exponent", lambda x: x.abs() ** (x.shape[0] / 4), tolerance=1e-5),
    one("least", lambda x: x * torch.sym_min(x.shape[0] / 2, 3.3)),
    one("difference_of_squares", lambda x: x * ((x.shape[0] / 2) ** 2 - (x.shape[0] ** 2) / 4 + 1)),
    one("reciprocal", lambda x: x * (1 / (x.shape[0] - 0.5))),
    one("compared", lambda x: x * (torch.arange(x.shape[0]) > x.shape[0] / 3)[:, None]),
    one("chosen", lambda x: torch.where(x > 0, x.shape[0] ** -0.5, x)),
    one("filled", lambda x: torch.full((x.shape[0], 2), x.shape[0] / 7)),
    one("tensor", lambda x: x * torch.tensor([x.shape[0] * 0.5, x.shape[0] // 2, 1.5, 2])),
    one("alpha", lambda x: torch.add(x, x, alpha=x.shape[0] / 3)),
    one("bounds", lambda x: x.clamp(-1 / x.shape[0], x.shape[0] / 10)),
    one("f64", lambda x: x.double() * (x.shape[0] / 3)),
    one("quotient_rounded_up", lambda x: x * math.ceil(x.shape[0] / 3)),
    one("multiple_of_a_quotient", lambda x: x * math.floor((x.shape[0] + 30) / 3 * 2)),
    one("padding", lambda x: torch.nn.functional.pad(x, (0, 0, 0, math.ceil(x.shape[0] / 4) * 4 - x.shape[0]))),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("calculated"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
