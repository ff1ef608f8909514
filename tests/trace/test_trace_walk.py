"""Walks over a model give what torch's own give, in their order."""

import torch
from torch import nn

from t2n_hf.trace.walk import modules_of, named_modules_of, named_tensors_of


def shared_parts() -> nn.Module:
    """Parts that are there twice, empty places, tied weights, and a buffer."""
    first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    model = nn.Sequential(first, nn.Sequential(second, first), second, nn.BatchNorm1d(3))
    model.empty = None
    model.register_module("nothing", None)
    first.register_parameter("missing", None)
    model[2][0].weight = model[1][0][0].weight
    model.register_buffer("scale", torch.ones(1))
    model.again = model.scale
    return model


def test_parts_are_those_of_torch_each_once():
    model = shared_parts()
    assert modules_of(model) == list(model.modules())


def test_names_of_parts_are_those_of_torch_with_the_second_ones():
    model = shared_parts()
    assert named_modules_of(model) == list(model.named_modules(remove_duplicate=False))


def test_tensors_are_those_of_torch_under_each_name():
    model = shared_parts()
    expected = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found = list(named_tensors_of(model))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(found, expected, strict=True))
