"""Blocks moved, windows laid out, and samples of images, against PyTorch, at sizes that were not traced."""

import itertools
import re

import pytest
from op_harness import Case, build, build_and_run, compare, floats
from torch.nn import functional as F

from t2n_hf.errors import EmitError

pytestmark = pytest.mark.tract

IMAGE, VOLUME = floats(2, 8, 6, 10), floats(1, 2, 4, 5, 6)
SIDES = {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
IMAGES = ((floats(1, 8, 12, 8, seed=1),), (floats(3, 8, 16, 14, seed=2),))
GRID = floats(2, 5, 4, 2, seed=3) * 1.5
OTHER_GRIDS = ((IMAGES[0][0], floats(1, 3, 9, 2)), (IMAGES[1][0], floats(3, 1, 2, 2, seed=4) * 2))


def image(name, function):
    return Case(name, function, (IMAGE,), SIDES, IMAGES, 1e-5, least=6)


def fixed(name, function, *inputs):
    return Case(name, function, inputs, {}, (), 1e-5)


def unfolded(x):
    return F.unfold(x, 3), F.unfold(x, (2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), F.unfold(x, 2, stride=2)


def folded(x):
    """Overlapping windows added up, with some of the image left free."""
    options = {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
    return F.fold(F.unfold(x, **options), x.shape[-2:], **options)


def unshuffled_by_two(x):
    return F.pixel_unshuffle(x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2], 2)


WAYS = [
    way
    for way in itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True))
    if way[:2] != ("bicubic", "border")
]


def sampled(x, grid):
    """Every way, at places inside and far outside."""
    return [F.grid_sample(x, grid, *way) for way in WAYS]


def affine(theta):
    return [F.affine_grid(theta, (2, 3, 4, 5), align) for align in (False, True)]


def affine_of_image(theta, x):
    return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)


def sampled_volume(x, grid):
    return [F.grid_sample(x, grid, mode, align_corners=False) for mode in ("bilinear", "nearest")]


CASES = [
    image("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2)),
    fixed("pixel_unshuffle", unshuffled_by_two, IMAGE),
    image("channel_shuffle", lambda x: F.channel_shuffle(x, 4)),
    fixed("shuffles_without_batch", lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), IMAGE[0]),
    fixed("shuffles_of_rank_five", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), floats(2, 1, 8, 3, 5)),
    image("unfold", unfolded),
    fixed("unfold_without_batch", unfolded, IMAGE[0]),
    fixed("fold", folded, IMAGE),
    fixed("fold_without_batch", folded, IMAGE[0]),
    Case(
        "grid_sample",
        sampled,
        (IMAGE, GRID),
        {**SIDES, (1, 0): "B", (1, 1): "U", (1, 2): "V"},
        OTHER_GRIDS,
        1e-5,
    ),
    Case(
        "grid_sample_of_one_size",
        sampled,
        (IMAGE, GRID),
        {(0, 0): "B", (1, 0): "B"},
        ((floats(3, 8, 6, 10, seed=5), floats(3, 5, 4, 2, seed=6) * 2),),
        1e-5,
    ),
    fixed("grid_sample_volume", sampled_volume, VOLUME, floats(1, 2, 3, 4, 3)),
    fixed("affine_grid", affine, floats(2, 2, 3)),
    fixed("affine_grid_volume", lambda theta: F.affine_grid(theta, (2, 1, 2, 3, 4), False), floats(2, 3, 4)),
    fixed("affine_grid_of_an_image", affine_of_image, floats(2, 2, 3), IMAGE),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("patches"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)


def test_places_in_an_image_are_counted_without_products_of_integers(archives):
    """Of those tract makes masks, and of those of deformable attention it makes them for minutes."""
    text = (archives / "grid_sample_of_one_size" / "model" / "graph.nnef").read_text()
    parts = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in text.splitlines() if " = " in line}
    moved, whole = {"x1"}, set()
    for name, value in parts.items():
        used = set(re.findall(r"\w+", value))
        moved |= {name} if used & moved else set()
        whole |= {name} if 'to="i64"' in value or (value.startswith("add(") and used & whole) else set()
        assert not (value.startswith("mul(") and used & whole & moved), f"{name} = {value}"
    assert whole & moved


def test_a_way_that_tract_does_otherwise_is_refused(tmp_path):
    case = fixed("border", lambda x, grid: F.grid_sample(x, grid, "bicubic", "border", False), IMAGE, GRID)
    with pytest.raises(EmitError, match="bicubic grid_sample with padding_mode 'border'"):
        build(case, tmp_path / "border")
