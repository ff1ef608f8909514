"""Changes of resolution in each mode, against PyTorch, at sizes that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats
from torch.nn import functional as F

pytestmark = pytest.mark.tract

LINE, IMAGE, VOLUME = floats(2, 3, 9), floats(2, 3, 7, 8), floats(1, 2, 4, 5, 6)
SIDES = {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
IMAGES = ((floats(1, 3, 12, 9, seed=1),), (floats(3, 3, 5, 14, seed=2),))
GUIDES = ((floats(1, 3, 12, 9), floats(1, 1, 17, 5)), (floats(1, 3, 5, 14), floats(1, 1, 31, 29)))
SMOOTH = ("bilinear", "bicubic")
ALL = ("nearest", "nearest-exact", *SMOOTH)


def each(modes, **options):
    return lambda x: [F.interpolate(x, mode=mode, **options) for mode in modes]


def of_the_size_of_another(x, guide):
    return [F.interpolate(x, size=guide.shape[2:], mode=mode) for mode in ALL]


def nearest_by_fraction(x):
    """Which element is the nearest hangs on the last bit of a float."""
    return [F.interpolate(x, scale_factor=n / 10, mode=mode) for n in range(3, 21) for mode in ALL[:2]]


def nearest_to_sizes(x):
    return [F.interpolate(x, size=n, mode=mode) for n in range(1, 60, 7) for mode in ALL[:2]]


def image(name, function):
    return Case(name, function, (IMAGE,), SIDES, IMAGES, 1e-5, least=4)


def fixed(name, function, *inputs, tolerance=1e-5):
    return Case(name, function, inputs, {}, (), tolerance)


def antialiased(x):
    tall, wide = torch.ops.aten._upsample_lanczos2d_aa(x, [3, 12], False), {"size": (12, 3), "antialias": True}
    return [tall, *each(SMOOTH, scale_factor=0.4, antialias=True)(x), *each(SMOOTH, align_corners=True, **wide)(x)]


def by_overload(x):
    aten = torch.ops.aten
    return [
        aten.upsample_bilinear2d(x, [3, 12], False),
        aten.upsample_bicubic2d(x, [10, 11], False, 1.5, 1.5),
        aten.upsample_nearest2d(x, [10, 12], 1.5, 1.6),
        aten._upsample_bilinear2d_aa(x, [3, 4], False),
    ]


def of_line(x):
    return [
        F.interpolate(x, size=14, mode="linear"),
        F.interpolate(x, size=4, mode="linear", align_corners=True),
        F.interpolate(x, scale_factor=1.5),
        F.interpolate(x, size=14, mode="nearest-exact"),
        F.interpolate(x, size=4, mode="area"),
    ]


CASES = [
    image("twice", each(ALL, scale_factor=2.0)),
    image("by_two_factors", each(ALL, scale_factor=(3.0, 1.0))),
    image("by_half", each(ALL, scale_factor=(0.5, 1.5))),
    image("to_a_size", each(ALL, size=(11, 5))),
    image("area", each(["area"], size=(3, 2))),
    image("aligned", each(SMOOTH, size=(11, 5), align_corners=True)),
    image("aligned_twice", each(SMOOTH, scale_factor=2.0, align_corners=True)),
    image("antialiased", each(SMOOTH, size=(3, 5), antialias=True)),
    image("of_bytes", lambda x: F.interpolate((x.abs() * 10).to(torch.uint8), size=(13, 16))),
    Case(
        "of_the_size_of_another",
        of_the_size_of_another,
        (IMAGE, floats(1, 1, 11, 20)),
        {**SIDES, (1, 2): "U", (1, 3): "V"},
        GUIDES,
        1e-5,
        least=4,
    ),
    fixed("fixed_by_fraction", each(ALL, scale_factor=(0.6, 1.7)), IMAGE),
    fixed("fixed_by_fraction_anew", each(ALL, scale_factor=1.4, recompute_scale_factor=True), IMAGE),
    fixed("fixed_large", each(ALL, size=(97, 113)), floats(1, 1, 31, 57)),
    fixed("fixed_small", each(ALL, size=(7, 13)), floats(1, 1, 31, 57)),
    fixed("aligned_to_one", each(SMOOTH, size=(1, 5), align_corners=True), IMAGE),
    fixed("nearest_by_fraction", nearest_by_fraction, floats(1, 1, 30), tolerance=0),
    fixed("nearest_to_sizes", nearest_to_sizes, floats(1, 1, 41), tolerance=0),
    fixed("fixed_antialiased", antialiased, IMAGE),
    fixed("by_overload", by_overload, IMAGE),
    fixed("line", of_line, LINE),
    fixed("volume", each(("trilinear", "nearest", "nearest-exact", "area"), size=(3, 9, 6)), VOLUME),
    Case("half_precision", each(SMOOTH, scale_factor=1.5), (IMAGE.half(),), {}, (), 2e-3, torch.float16),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("resize"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
