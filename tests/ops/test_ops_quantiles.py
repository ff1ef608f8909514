"""Quantiles and medians of numbers, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

pytestmark = pytest.mark.tract

X = floats(2, 5, 4)
WITH_NAN = torch.where(X > 0.8, float("nan"), X)
QUARTERS = torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])
KINDS = ("linear", "lower", "higher", "midpoint", "nearest")


def one(name, function, x=X, **options):
    wide = torch.cat([x, x.flip(1) * 2], 1)
    others = ((wide[:, :9],), (wide[:, :8],), (x[:, :1],))  # quantiles between two elements, and not
    return Case(name, function, (x,), {(0, 1): "S"}, others, tolerance=1e-5, **options)


CASES = [
    *(one(f"quantile_{kind}", lambda x, kind=kind: x.quantile(0.3, 1, interpolation=kind)) for kind in KINDS),
    *(one(f"quantiles_{kind}", lambda x, kind=kind: x.quantile(QUARTERS, -1, interpolation=kind)) for kind in KINDS),
    one("quantile_of_all", lambda x: x.quantile(0.7)),
    one("quantiles_of_all_kept", lambda x: x.quantile(QUARTERS, keepdim=True)),
    one("quantiles_kept", lambda x: x.quantile(QUARTERS, dim=1, keepdim=True)),
    one("quantile_kept", lambda x: x.quantile(0.5, dim=-2, keepdim=True)),
    one("quantile_of_a_given_part", lambda x: x.quantile(x[0, 0, 0].sigmoid(), 1)),
    one("quantile_with_nan", lambda x: x.quantile(QUARTERS, 1), x=WITH_NAN),
    one("quantile_of_infinities", lambda x: torch.where(x > 0.3, float("inf"), x).quantile(QUARTERS, 1)),
    *(
        one(f"nanquantile_{kind}", lambda x, k=kind: x.nanquantile(0.3, 1, interpolation=k), x=WITH_NAN)
        for kind in KINDS
    ),
    one("nanquantiles", lambda x: x.nanquantile(QUARTERS, -1, keepdim=True), x=WITH_NAN),
    one("nanquantiles_of_all", lambda x: x.nanquantile(QUARTERS), x=WITH_NAN),
    one("nanquantile_of_nothing", lambda x: torch.where(x > 0, float("nan"), x).nanquantile(0.5, 2)),
    one("nanmedian", lambda x: x.nanmedian(), x=WITH_NAN),
    one("nanmedian_along", lambda x: x.nanmedian(1).values, x=WITH_NAN),
    one("nanmedian_kept", lambda x: x.nanmedian(-1, keepdim=True)),
    one("nanmedian_of_nothing", lambda x: torch.where(x > 0, float("nan"), x).nanmedian(2).values),
    one("nanmedian_of_int", lambda x: (x * 3).int().nanmedian(1).values),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("quantiles"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
