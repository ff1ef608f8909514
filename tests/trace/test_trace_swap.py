import pytest
import torch
from torch import nn

from t2n_hf.trace.swap import (
    attributes_kept,
    attributes_replaced,
    methods_replaced,
    methods_replaced_by_class,
    plain_tensors_kept,
    tensors_of,
    tensors_replaced,
)


def twice():
    linear = nn.Linear(2, 2)
    return nn.Sequential(linear, linear)


def test_every_name_of_a_tensor_is_given():
    assert sorted(tensors_of(twice())) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_a_module_with_two_names_holds_its_own_tensors_again_after_an_error():
    module = twice()
    weight = module[0].weight

    def fail():
        with tensors_replaced(module, dict.fromkeys(("0.weight", "1.weight"), torch.ones(1))):
            assert module[0].weight.shape == (1,)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert module[0].weight is weight


def test_plain_tensors_come_back_and_other_attributes_are_left_alone():
    module = nn.Sequential(nn.Identity())
    module[0].table = table = torch.ones(2)
    with plain_tensors_kept(module):
        module[0].table = module[0].late = torch.zeros(2)
        module[0].count = 1
    assert module[0].table is table
    assert not hasattr(module[0], "late")
    assert module[0].count == 1


def test_a_dict_of_tensors_that_a_forward_fills_is_as_it_was():
    module = nn.Sequential(nn.Identity())
    module[0].cache = cache = {"known": (table := torch.ones(2)), "count": 1}
    with plain_tensors_kept(module):
        cache |= {"known": torch.zeros(2), "late": torch.zeros(2), "count": 2}
    assert module[0].cache is cache
    assert cache == {"known": table, "count": 2}


def test_attributes_are_replaced_for_a_while():
    layer = nn.Linear(2, 2)
    before = dict(vars(layer))

    def fail():
        with attributes_replaced(layer, {"forward": len, "in_features": 5}):
            assert (layer([1, 2, 3]), layer.in_features) == (3, 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert vars(layer) == before


def test_functions_stand_in_as_methods_of_the_module():
    layer = nn.Linear(2, 3)
    before = dict(vars(layer))
    with methods_replaced(layer, {"forward": lambda self, x: (self.out_features, x)}):
        assert layer(7) == (3, 7)
    assert vars(layer) == before


def test_classes_have_other_methods_for_a_while():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4)), nn.Tanh())
    before = [dict(vars(module)) for module in model.modules()]
    with methods_replaced_by_class(
        model, lambda kind: {"forward": lambda self, x: [*x, self.out_features]} if kind is nn.Linear else {}
    ):
        assert model[:2]([]) == [3, 4]
        assert model[2](torch.zeros(1)) == 0
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_module_has_only_what_it_had_after_an_error():
    module = nn.Linear(2, 2)
    weight = module.weight

    def change():
        with attributes_kept(module):
            module.found = 1
            del module.in_features
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        change()
    assert not hasattr(module, "found")
    assert module.in_features == 2
    assert module.weight is weight
