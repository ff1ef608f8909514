"""Poolings in each form, against PyTorch, at sizes that were not traced."""

import pytest
from op_harness import Case, build_and_run, compare, floats
from torch.nn import functional as F

pytestmark = pytest.mark.tract

LINE, IMAGE, VOLUME = floats(2, 3, 11), floats(2, 3, 11, 14), floats(1, 2, 5, 6, 7)
SIDES = {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
IMAGES = ((floats(1, 3, 12, 9, seed=1),), (floats(3, 3, 10, 15, seed=2),), (floats(1, 3, 13, 16, seed=2),))


def image(name, function):
    return Case(name, function, (IMAGE,), SIDES, IMAGES, 1e-5, least=8)


def fixed(name, function, *inputs):
    return Case(name, function, inputs, {}, (), 1e-5)


def both(**options):
    """Of a fixed size and of a free one the same."""

    def function(x):
        kernels = (F.avg_pool2d, {"count_include_pad": False}), (F.avg_pool2d, {}), (F.max_pool2d, {})
        return [pool(x, **{**options, **more}) for pool, more in kernels]

    return function


def max_with_indices(x):
    return F.max_pool2d(x, 3, 2, 1, return_indices=True)


def free_channels(x):
    return F.max_pool1d(x, 3, 2), F.avg_pool1d(x, 3, 2, ceil_mode=True)


def of_line(x):
    return F.max_pool1d(x, 3, 2, 1, ceil_mode=True), F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), F.lp_pool1d(x, 2, 3)


def of_volume(x):
    pools = (F.max_pool3d, F.avg_pool3d)
    return [pool(x, 2, (1, 2, 3), 1, ceil_mode=mode) for pool in pools for mode in (False, True)]


def adaptive(x):
    sizes = ((1, 1), (3, 4), (11, 7))
    return [pool(x, size) for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d) for size in sizes]


CASES = [
    image("plain", both(kernel_size=2)),
    image("strided_and_padded", both(kernel_size=(3, 4), stride=(2, 1), padding=(1, 2))),
    image("reaching_over", both(kernel_size=3, stride=2, padding=1, ceil_mode=True)),
    image("max_dilated", lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2)),
    image("max_with_indices", max_with_indices),
    image("sum_divided", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5)),
    image("lp", lambda x: F.lp_pool2d(x, 3, 2)),
    image("adaptive", adaptive),
    image("max_of_ints", lambda x: F.max_pool2d((x * 10).long(), 3, 2, 1)),
    fixed("fixed_reaching_over", both(kernel_size=3, stride=2, padding=1, ceil_mode=True), floats(1, 3, 12, 13)),
    fixed("fixed_reaching_over_far", both(kernel_size=(2, 3), stride=(3, 4), ceil_mode=True), IMAGE),
    fixed("without_batch", both(kernel_size=2, stride=2, ceil_mode=True), IMAGE[0]),
    fixed("line", of_line, LINE),
    fixed("volume", of_volume, VOLUME),
    fixed("adaptive_along_one_axis", lambda x: F.adaptive_avg_pool2d(x, (5, None)), IMAGE),
    fixed("adaptive_line", lambda x: (F.adaptive_avg_pool1d(x, 4), F.adaptive_max_pool1d(x, 4)), LINE),
    fixed("adaptive_divided", lambda x: F.adaptive_max_pool2d(x, (2, 7), return_indices=True), IMAGE[:, :, :10]),
    fixed("adaptive_volume", lambda x: (F.adaptive_avg_pool3d(x, (2, 4, 7)), F.adaptive_max_pool3d(x, 3)), VOLUME),
    fixed("adaptive_without_batch", adaptive, IMAGE[0]),
    Case("free_channels", free_channels, (LINE,), {(0, 1): "S"}, ((floats(2, 5, 11),),), 1e-5, least=2),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("pooling"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
