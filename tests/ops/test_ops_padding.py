"""Paddings of each mode, against PyTorch, at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats
from torch.nn import functional as F

pytestmark = pytest.mark.tract

LINE, IMAGE, VOLUME = floats(2, 3, 9), floats(2, 3, 7, 8), floats(1, 2, 4, 5, 6)
LENGTH, SIDES = {(0, 0): "B", (0, 2): "S"}, {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
LINES = ((floats(1, 3, 16, seed=1),), (floats(3, 3, 11, seed=2),))
IMAGES = ((floats(1, 3, 12, 9, seed=1),), (floats(3, 3, 6, 14, seed=2),))


def line(name, function, least=6):
    return Case(name, function, (LINE,), LENGTH, LINES, 0, least=least)


def image(name, function):
    return Case(name, function, (IMAGE,), SIDES, IMAGES, 0, least=6)


def fixed(name, function, *inputs):
    return Case(name, function, inputs, {}, (), 0)


def to_multiple(mode):
    """What windowed models do: each side up to a multiple of 4."""

    def function(x):
        high, wide = -x.shape[2] % 4, -x.shape[3] % 4
        return F.pad(x, (0, wide, 0, high), mode=mode)

    return function


CASES = [
    line("constant", lambda x: F.pad(x, (1, 2), value=0.5)),
    line("constant_of_infinity", lambda x: F.pad(x, (1, 2), value=float("-inf"))),
    line("constant_of_ints", lambda x: F.pad((x * 10).long(), (1, 2), value=7)),
    line("constant_of_bools", lambda x: F.pad(x > 0, (1, 0), value=True)),
    line("negative", lambda x: F.pad(x, (-1, 2))),
    line("negative_both", lambda x: F.pad(x, (-1, -2))),
    line("front_axes", lambda x: F.pad(x, (0, 0, 1, 0, 2, 1), value=1.0)),
    line("to_fixed_length", lambda x: F.pad(x, (0, 12 - x.shape[2]))),
    line("to_twice_the_length", lambda x: F.pad(x, (0, x.shape[2]))),
    line("reflect", lambda x: F.pad(x, (3, 2), mode="reflect")),
    line("reflect_by_half", lambda x: F.pad(x, (0, x.shape[2] // 2), mode="reflect")),
    line("replicate", lambda x: F.pad(x, (3, 12), mode="replicate")),
    line("replicate_to_fixed_length", lambda x: F.pad(x, (0, 20 - x.shape[2]), mode="replicate")),
    line("circular", lambda x: F.pad(x, (3, 2), mode="circular")),
    line("circular_all", lambda x: F.pad(x, (x.shape[2], 0), mode="circular")),
    line("circular_cut", lambda x: F.pad(x, (-2, 3), mode="circular")),
    image("constant_to_multiple", to_multiple("constant")),
    image("replicate_to_multiple", to_multiple("replicate")),
    image("reflect_two_axes", lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect")),
    image("circular_two_axes", lambda x: F.pad(x, (1, 2, 3, 0), mode="circular")),
    fixed("reflect_without_batch", lambda x: F.pad(x, (1, 2), mode="reflect"), LINE[0]),
    fixed("replicate_three_axes", lambda x: F.pad(x, (1, 2, 0, 1, 2, 0), mode="replicate"), VOLUME),
    fixed("reflect_three_axes", lambda x: F.pad(x, (1, 2, 0, 1, 2, 0), mode="reflect"), VOLUME),
    fixed("reflection_pad1d", lambda x: torch.ops.aten.reflection_pad1d(x, [2, 1]), LINE),
    fixed("replication_pad2d", lambda x: torch.ops.aten.replication_pad2d(x, [2, 1, 0, 3]), IMAGE),
    fixed("constant_pad_nd", lambda x: torch.ops.aten.constant_pad_nd(x, [2, 1], 3.0), IMAGE),
    fixed("nothing", lambda x: F.pad(x, (0, 0)), LINE),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("padding"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
