"""Bags of rows, and bilinear layers, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, interface_for, seeded
from torch import nn
from torch.nn import functional as F

from t2n_hf.errors import EmitError
from t2n_hf.export.lower import lower
from t2n_hf.trace.capture import capture

MODES = ("sum", "mean", "max")
TABLE, WEIGHTS = floats(7, 4), floats(9, seed=2)


def ints(*shape, high=7, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def rows(name, module):
    """A matrix of places, one row a bag, whose rows and length are free."""
    lengths = {(0, 0): "N", (0, 1): "S"}
    return Case(name, seeded(module), (ints(3, 5),), lengths, ((ints(4, 2, seed=1),), (ints(1, 1),)), 1e-5)


def bags(name, function, *more, offsets=(0, 2, 2, 6), other=(0, 1, 5, 5)):
    """Elements in a row, their number free, and where each bag begins."""
    given = [(ints(count, seed=count), torch.tensor(begins)) for count, begins in ((9, offsets), (8, other))]
    extra = [tuple(x[: len(places)] for x in more) for places, _ in given]
    lengths = {(0, 0): "T"} | ({(2, 0): "T"} if more else {})
    return Case(name, function, (*given[0], *extra[0]), lengths, ((*given[1], *extra[1]),), 1e-5, least=8)


def of_mode(mode, **options):
    return lambda places, offsets: F.embedding_bag(places, TABLE, offsets, mode=mode, **options)


CASES = [
    *(rows(f"rows_{mode}", nn.EmbeddingBag(7, 4, mode=mode)) for mode in MODES),
    *(rows(f"rows_{mode}_padded", nn.EmbeddingBag(7, 4, mode=mode, padding_idx=2)) for mode in MODES),
    *(bags(f"bags_{mode}", of_mode(mode)) for mode in MODES),
    *(bags(f"bags_{mode}_padded", of_mode(mode, padding_idx=-3)) for mode in MODES),
    *(
        bags(
            f"bags_{mode}_with_the_end",
            of_mode(mode, include_last_offset=True),
            offsets=(0, 2, 2, 9),
            other=(0, 3, 5, 8),
        )
        for mode in MODES
    ),
    bags(
        "bags_weighted",
        lambda places, offsets, weights: F.embedding_bag(
            places, TABLE, offsets, mode="sum", per_sample_weights=weights
        ),
        WEIGHTS,
    ),
    Case(
        "bags_of_a_free_number",
        of_mode("mean"),
        (ints(9), torch.tensor([0, 3, 4])),
        {(0, 0): "T", (1, 0): "N"},
        ((ints(6), torch.tensor([0, 2])), (ints(2), torch.tensor([0]))),
        1e-5,
    ),
    Case(
        "bilinear",
        seeded(nn.Bilinear(4, 3, 5)),
        (floats(2, 6, 4), floats(2, 6, 3)),
        {(0, 1): "S", (1, 1): "S"},
        ((floats(2, 9, 4), floats(2, 9, 3)), (floats(2, 1, 4), floats(2, 1, 3))),
        1e-5,
    ),
    Case("bilinear_without_bias", seeded(nn.Bilinear(4, 3, 5, bias=False)), (floats(2, 4), floats(2, 3)), {}, (), 1e-5),
    Case("bilinear_of_vectors", seeded(nn.Bilinear(4, 3, 1)), (floats(4), floats(3)), {}, (), 1e-5),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("bags"))


@pytest.mark.tract
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)


def test_results_for_training_are_refused():
    def of_bags(places, offsets):
        return torch.ops.aten._embedding_bag(TABLE, places, offsets)[1]

    interface = interface_for(bags("training", of_bags))
    with pytest.raises(EmitError, match="its results beside the first, which only training uses"):
        lower(capture(interface, torch.float32), {}, dtype="f32")
