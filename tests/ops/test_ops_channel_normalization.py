"""Batch, instance, group and weight norm, against PyTorch, at sizes that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

pytestmark = pytest.mark.tract

LINE, IMAGE, VOLUME = floats(2, 4, 9), floats(2, 4, 7, 8), floats(2, 4, 3, 4, 5)
SIDES = {(0, 0): "B", (0, 2): "H", (0, 3): "W"}
IMAGES = ((floats(1, 4, 12, 9, seed=1),), (floats(3, 4, 5, 14, seed=2),))


def image(name, module):
    return Case(name, seeded(module), (IMAGE,), SIDES, IMAGES, 1e-5)


def fixed(name, module, *inputs, **options):
    return Case(name, seeded(module) if isinstance(module, nn.Module) else module, inputs, {}, (), 1e-5, **options)


class OfBatch(nn.BatchNorm2d):
    """As a model is that normalises by its batch in inference as well."""

    def __init__(self):
        super().__init__(4, track_running_stats=False)


class Native(nn.Module):
    def forward(self, x, mean, weight):
        aten = torch.ops.aten
        variance = weight.abs() + 1
        return [
            aten._native_batch_norm_legit_no_training(x, weight, mean, mean, variance, 0.1, 1e-3)[0],
            aten.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-3)[0],
            aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.1, 1e-3)[0],
            aten.native_group_norm(x, weight, mean, 2, 4, 56, 2, 1e-3)[0],
            aten.instance_norm(x, weight, mean, mean, variance, False, 0.1, 1e-3, False),
        ]


def lengths(v, g):
    aten = torch.ops.aten
    return [torch._weight_norm(v, g, 0), *aten._weight_norm_interface(v, g, 0), torch.norm_except_dim(v, 2, 0)]


HALF = seeded(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True))).half()

CASES = [
    image("batch", nn.BatchNorm2d(4)),
    image("batch_plain", nn.BatchNorm2d(4, affine=False)),
    image("batch_without_statistics", OfBatch()),
    image("group", nn.GroupNorm(2, 4)),
    image("group_plain", nn.GroupNorm(4, 4, affine=False)),
    image("instance", nn.InstanceNorm2d(4)),
    image("instance_affine", nn.InstanceNorm2d(4, affine=True)),
    image("instance_with_statistics", nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    image("local_response", nn.LocalResponseNorm(3)),
    fixed("batch_of_rows", nn.BatchNorm1d(4), floats(5, 4)),
    fixed("batch_line", nn.BatchNorm1d(4), LINE),
    fixed("batch_volume", nn.BatchNorm3d(4), VOLUME),
    fixed("instance_line", nn.InstanceNorm1d(4, affine=True), LINE),
    fixed("instance_without_batch", nn.InstanceNorm1d(4), LINE[0]),
    fixed("group_line", nn.GroupNorm(2, 4), LINE),
    fixed("native", Native(), IMAGE, floats(4), floats(4, seed=1)),
    fixed("weight_norm", parametrizations.weight_norm(nn.Conv1d(4, 6, 3, padding=1)), LINE),
    fixed("weight_norm_of_last_axis", parametrizations.weight_norm(nn.Conv1d(4, 6, 3, padding=1), dim=2), LINE),
    fixed("weight_norm_of_all", parametrizations.weight_norm(nn.Linear(4, 6), dim=None), floats(2, 4)),
    fixed("spectral_norm", parametrizations.spectral_norm(nn.Linear(4, 6)), floats(2, 4)),
    fixed("lengths", lengths, floats(5, 4, 3), floats(5, 1, 1)),
    Case("of_a_large_mean", lambda x: F.group_norm(x * 0.1 + 30, 2), (IMAGE,), tolerance=1e-4),
    Case("half_precision", HALF, (IMAGE.half(),), {}, (), 5e-3, torch.float16),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("channels"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
