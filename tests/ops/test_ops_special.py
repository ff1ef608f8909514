"""Functions that tract has no operators for, over the ranges on which they are made in different ways."""

import pytest
import torch
from op_harness import Case, build_and_run, compare

pytestmark = pytest.mark.tract

EVERYWHERE = torch.cat([torch.linspace(-30, 30, 241), torch.linspace(-4, 4, 161), torch.tensor([3.75, -3.75, 0.0])])
# Gamma has poles at whole numbers from 0 down: between them, and at them.
BETWEEN = torch.cat([torch.linspace(-6.03, 40, 301), torch.tensor([1e-3, 0.5, 1.4616, 100.0, 1e4, -0.001, -5.9])])
POLES = torch.tensor([0.0, -1.0, -7.0])


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def case(name, function, x, tolerance=2e-6):
    return Case(name, Of(function), (x,), tolerance=tolerance)


def log_size(function):
    """The logarithm of the size, so that the smallest of results are compared as closely as the largest."""
    return lambda x: (function(x).abs() + 1e-30).log()


ABOVE = BETWEEN[BETWEEN > 0]
CASES = [
    case("i0e", torch.special.i0e, EVERYWHERE),
    case("i1e", torch.special.i1e, EVERYWHERE),
    case("i0", log_size(torch.i0), EVERYWHERE),
    case("i1", log_size(torch.special.i1), EVERYWHERE[EVERYWHERE != 0]),
    case("i1_of_sides", lambda x: torch.special.i1(x).sign(), EVERYWHERE),
    case("erfcx", log_size(torch.special.erfcx), EVERYWHERE[EVERYWHERE > -9]),
    case("log_ndtr", torch.special.log_ndtr, EVERYWHERE),
    case("log_ndtr_far_above", log_size(torch.special.log_ndtr), torch.linspace(1, 5, 80)),
    case("digamma", torch.digamma, BETWEEN[BETWEEN.abs() > 0.01]),
    case("digamma_at_poles", lambda x: torch.digamma(x).nan_to_num(3.0, 1.0, -1.0), POLES),
    case("trigamma", log_size(lambda x: torch.polygamma(1, x)), ABOVE),
    case("trigamma_below", log_size(lambda x: torch.polygamma(1, x)), BETWEEN[BETWEEN < 0], 2e-5),
    *(case(f"polygamma_{n}", log_size(lambda x, n=n: torch.polygamma(n, x)), ABOVE) for n in (2, 3, 5)),
    case("polygamma_of_signs", lambda x: torch.polygamma(2, x).sign(), BETWEEN),
    case("polygamma_2_below", lambda x: torch.polygamma(2, x), torch.tensor([-0.3, -0.8, -2.4, -3.7]), 1e-5),
    case("of_whole_numbers", lambda x: torch.digamma(x) + torch.i0(x) + torch.special.erfcx(x), torch.arange(1, 7)),
    case("of_double", lambda x: (torch.digamma(x.double()) + torch.special.i1e(x.double())).float(), ABOVE),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("special"))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_agrees_with_torch(one, archives):
    compare(one, archives / one.name)
