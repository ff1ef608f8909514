"""Convolutions and transposed ones, against PyTorch, at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, seeded
from torch import nn
from torch.nn import functional as F

# torch says so whenever it does that.
SAME = "ignore:Using padding='same' with even kernel lengths"
pytestmark = [pytest.mark.tract, pytest.mark.filterwarnings(SAME)]

LINE, IMAGE, VOLUME = floats(2, 4, 9), floats(2, 4, 9, 8), floats(1, 4, 5, 6, 7)
LENGTH, SIDES = {(0, 0): "B", (0, 2): "S"}, {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
LINES = ((floats(1, 4, 16, seed=1),), (floats(3, 4, 11, seed=2),))
IMAGES = ((floats(1, 4, 12, 9, seed=1),), (floats(3, 4, 7, 14, seed=2),))


def line(name, module, **options):
    return Case(name, seeded(module), (LINE,), LENGTH, LINES, 1e-5, least=6, **options)


def image(name, module, **options):
    return Case(name, seeded(module), (IMAGE,), SIDES, IMAGES, 1e-5, least=6, **options)


def fixed(name, function, *inputs):
    return Case(name, seeded(function) if isinstance(function, nn.Module) else function, inputs, {}, (), 1e-5)


class Joined(nn.Module):
    """A convolution of what was one axis, which makes tract move slices over a reshape."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), layer

    def forward(self, x):
        rows = self.first(x.flatten(2).transpose(1, 2))
        return self.layer(rows.transpose(1, 2).reshape(x.shape))


def general(x, w, b):
    return torch.ops.aten.convolution(x, w, b, [2, 1], [1, 0], [1, 2], True, [1, 0], 2)


HALF = seeded(nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2)).half()

CASES = [
    line("conv1d", nn.Conv1d(4, 6, 3)),
    line("conv1d_strided", nn.Conv1d(4, 6, 3, stride=2, padding=1)),
    line("conv1d_dilated", nn.Conv1d(4, 6, 2, stride=3, padding=2, dilation=3)),
    line("conv1d_same", nn.Conv1d(4, 6, 4, padding="same")),
    line("conv1d_same_dilated", nn.Conv1d(4, 6, 4, padding="same", dilation=3)),
    line("conv1d_valid", nn.Conv1d(4, 6, 3, padding="valid", stride=2)),
    line("conv1d_depthwise", nn.Conv1d(4, 8, 3, padding=1, groups=4)),
    line("conv1d_reflected", nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect")),
    line("conv1d_replicated", nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate")),
    line("conv1d_circular", nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular")),
    image("conv2d", nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
    image("conv2d_groups", nn.Conv2d(4, 6, 3, groups=2, bias=False)),
    image("conv2d_of_points", nn.Conv2d(4, 6, 1)),
    image("conv2d_of_every_second_point", nn.Conv2d(4, 6, 1, stride=2)),
    image("conv2d_of_every_second_row", nn.Conv2d(4, 6, (1, 3), stride=(2, 2), padding=(0, 1))),
    image("conv2d_behind_a_reshape", Joined(nn.Conv2d(4, 6, 1, stride=2))),
    image("conv2d_padded_widely", nn.Conv2d(4, 6, 3, padding=5)),
    fixed("conv2d_patches", nn.Conv2d(4, 6, 2, stride=2), floats(2, 4, 8, 8)),
    fixed("conv2d_without_batch", nn.Conv2d(4, 6, 3), IMAGE[0]),
    fixed("conv3d", nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1), groups=2), VOLUME),
    fixed("conv_of_given_weight", F.conv1d, LINE, floats(6, 4, 3)),
    fixed("conv_tbc", lambda x, w, b: torch.conv_tbc(x, w, b, 1), floats(7, 2, 4), floats(3, 4, 6), floats(6)),
    fixed("convolution", general, IMAGE, floats(4, 3, 3, 2), floats(6)),
    line("deconv1d", nn.ConvTranspose1d(4, 6, 4, stride=2)),
    line("deconv1d_cut", nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, bias=False)),
    line("deconv1d_longer", nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1)),
    line("deconv1d_longer_than_reached", nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=2)),
    line("deconv1d_dilated", nn.ConvTranspose1d(4, 6, 3, stride=2, dilation=2, padding=1)),
    line("deconv1d_groups", nn.ConvTranspose1d(4, 6, 3, groups=2)),
    line("deconv1d_depthwise", nn.ConvTranspose1d(4, 8, 4, stride=2, padding=1, groups=4)),
    image("deconv2d", nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(0, 1))),
    image("deconv2d_groups_dilated", nn.ConvTranspose2d(4, 2, 3, groups=2, dilation=2, stride=2)),
    fixed("deconv2d_without_batch", nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), IMAGE[0]),
    fixed("deconv3d", nn.ConvTranspose3d(4, 2, 2, stride=2, groups=2, output_padding=1), VOLUME),
    Case("deconv1d_in_half_precision", HALF, (LINE.half(),), LENGTH, (), 3e-3, torch.float16, least=6),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("convolution"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
