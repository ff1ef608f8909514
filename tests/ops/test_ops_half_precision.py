"""In f16, what sums many numbers up does so in f32, as torch does: against the same in f64."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_harness import Case, build_and_run, floats
from torch import nn

HALF = torch.float16
LINE = floats(2, 4096).abs().to(HALF)
IMAGE = floats(1, 256, 12, 12).abs().to(HALF)


def half(module: nn.Module, scale: float) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = (floats(*parameter.shape).abs() * scale).to(HALF)
    return module.eval()


CASES = [
    Case("sums_so_far", lambda x: torch.cumsum(x, 1), (LINE,), tolerance=4e-3, dtype=HALF),
    Case("mean_of_large_numbers", lambda x: (x * 30).mean(1), (LINE,), tolerance=4e-3, dtype=HALF),
    Case("mean_of_an_image", lambda x: F.adaptive_avg_pool2d(x * 3000, 1), (IMAGE,), tolerance=4e-3, dtype=HALF),
    Case("convolution", half(nn.Conv2d(256, 8, 3), 0.05), (IMAGE,), tolerance=4e-3, dtype=HALF),
    Case("transposed_convolution", half(nn.ConvTranspose2d(256, 8, 3), 0.05), (IMAGE,), tolerance=4e-3, dtype=HALF),
    Case("product", half(nn.Linear(4096, 16), 0.02), (LINE,), tolerance=4e-3, dtype=HALF),
    Case("softmax", lambda x: torch.softmax(x, 1), (LINE,), tolerance=4e-3, dtype=HALF),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("half"))


@pytest.mark.tract
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sum_of_many_halves_is_right_to_the_last_place(case, archives):
    folder = archives / case.name
    assert not (folder / "error").exists(), (folder / "error").read_text()
    got = np.load(folder / "out_0.npz")["arr_0"]
    function = deepcopy(case.function).double() if isinstance(case.function, nn.Module) else case.function
    with torch.no_grad():
        want = function(case.inputs[0].double()).numpy()
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype("f8"), want, rtol=3e-3, atol=1e-3 * np.abs(want).max())
