"""Walks over a model give what torch's own give, in their order."""

import torch
from torch import nn

from t2n_hf.trace.walk import (
    attribute_of,
    modules_of,
    named_modules_of,
    named_parameters_of,
    named_tensors_of,
    names_of,
    own_attributes,
    parts_known,
)


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


def test_parameters_are_those_of_torch_under_each_name():
    model = shared_parts()
    expected = list(model.named_parameters(remove_duplicate=False))
    found = list(named_parameters_of(model))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(found, expected, strict=True))


def test_each_part_has_its_first_name():
    model = shared_parts()
    assert [(name, part) for part, name in names_of(model).items()] == list(model.named_modules())


class Delegating(nn.Module):
    kind = "by its class"

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.own = 3

    @property
    def computed(self):
        return self.own + 1

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


def test_an_attribute_is_the_one_that_python_finds():
    delegating, plain = Delegating(nn.Linear(2, 3)), shared_parts()
    names = ("own", "kind", "computed", "inner", "weight", "out_features", "forward", "nowhere", "0", "scale", "empty")
    for part in (delegating, plain, plain[0], plain[3]):
        for name in names:
            found, expected = attribute_of(part, name), getattr(part, name, None)
            assert found is expected or found == expected


def test_own_attributes_are_those_that_a_bare_module_lacks():
    assert own_attributes(nn.Linear(2, 3)) == {"in_features", "out_features"}
    assert own_attributes(shared_parts()) == {"again", "empty"}


def test_parts_that_are_known_are_looked_up_again_after_the_block():
    model = shared_parts()
    with parts_known(model):
        model.append(nn.ReLU())
        assert model[-1] not in modules_of(model)
        assert modules_of(model[1]) == list(model[1].modules())
    assert modules_of(model) == list(model.modules())
