import pytest
import torch
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly
from t2n_hf.tensor.updater import ModTensorUpdater, TensorHoldKind


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(8, 4), nn.Linear(4, 8), nn.BatchNorm1d(8))
        self[1].weight = self[0].weight
        self[2].table = torch.arange(3.0)
        self.again = self[2]


@pytest.fixture
def model():
    return Model()


def everything(model):
    return ModTensorUpdater(model, add_buffers=True, add_unregistred_tensor=True)


def test_a_tied_tensor_has_one_entry_and_all_its_names(model):
    updater = ModTensorUpdater(model)
    assert [place.name for place in updater.places_of(model[1].weight)] == ["0.weight", "1.weight"]
    assert updater.id_to_names[id(model[0].weight)] == {"0.weight", "1.weight"}
    assert updater.name_to_id["1.weight"] == id(model[0].weight)
    assert updater.id_to_kind[id(model[0].weight)] is TensorHoldKind.PARAMETER
    assert updater.id_to_modules[id(model[0].weight)] == [model[0], model[1]]
    assert updater.name_to_parent_module["1.weight"] is model[1]
    assert sorted(updater.available_names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_buffers_and_plain_attributes_are_in_scope_when_they_are_asked_for(model):
    updater = everything(model)
    assert updater.get_by_name("2.running_mean") is model[2].running_mean
    assert updater.get_by_name("again.table") is model[2].table
    assert updater.id_to_kind[id(model[2].running_mean)] is TensorHoldKind.BUFFER
    assert updater.id_to_kind[id(model[2].table)] is TensorHoldKind.UNREGISTRED
    for name in ("2.running_mean", "2.table"):
        with pytest.raises(ConfigError, match=f"called '{name}'"):
            ModTensorUpdater(model).get_by_name(name)
    with pytest.raises(ConfigError, match="add_buffers=True"):
        ModTensorUpdater(model).update_by_ref(model[2].running_mean, torch.ones(8))


@pytest.mark.parametrize("by", ["name", "reference"])
def test_a_replaced_tensor_stays_tied_and_can_be_replaced_again(model, by):
    updater = everything(model)
    old, new = model[0].weight, nn.Parameter(torch.ones(8, 4))
    replaced = updater.update_by_name("1.weight", new) if by == "name" else updater.update_by_ref(old, new)
    assert model[0].weight is model[1].weight is new is replaced
    updater.update_by_ref(new, old)
    assert model[1].weight is old
    updater.update_by_ref(model[2].running_mean, torch.full((8,), 3.0))
    assert model[2].running_mean.tolist() == [3] * 8
    assert "2.running_mean" in dict(model.named_buffers())
    updater.update_by_name("again.table", torch.zeros(3))
    assert model[2].table.tolist() == [0, 0, 0]


def test_one_place_of_a_tied_tensor_can_be_replaced_alone(model):
    updater = ModTensorUpdater(model)
    old, new = model[0].weight, nn.Parameter(torch.ones(8, 4))
    updater.update_by_name("1.weight", new, tie_replacements=False)
    assert model[1].weight is new
    assert model[0].weight is old
    assert updater.id_to_names[id(old)] == {"0.weight"}
    updater.update_by_ref(old, nn.Parameter(torch.zeros(8, 4)))
    assert model[0].weight.sum() == 0
    assert model[1].weight is new
    shared = nn.Parameter(torch.ones(8))
    updater.update_by_name("again.weight", shared, tie_replacements=False)
    assert model[2].weight is shared


@pytest.mark.parametrize(
    "make", [QTensorTractScaleOnly.quantize, lambda t: OffloadedTensor.from_original_tensor(t, "w")]
)
def test_a_plain_or_opaque_tensor_becomes_a_parameter_where_one_was(make):
    model = nn.Sequential(nn.Linear(32, 4), nn.Linear(32, 4))
    updater = ModTensorUpdater(model)
    packed = make(model[0].weight.detach())
    updater.update_by_name("0.weight", packed)
    assert model[0].weight is packed
    assert "0.weight" in dict(model.named_parameters())
    updater.update_by_name("1.weight", torch.ones(4, 32))
    assert type(model[1].weight) is nn.Parameter
    assert model[1].weight.requires_grad
    with pytest.raises(ConfigError, match=r"1\.weight is a parameter, and so has to be what replaces it"):
        ModTensorUpdater(model, add_parameter_if_unset=False).update_by_name("1.weight", torch.ones(4, 32))


@pytest.mark.parametrize(
    ("new", "what"),
    [
        (torch.ones(4, 8), "shape"),
        (torch.ones(8, 4, dtype=torch.float16), "dtype"),
        (torch.ones(8, 4, device="meta"), "device"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_another_shape_dtype_or_device_has_to_be_meant(model, new, what):
    updater = ModTensorUpdater(model)
    before = model[0].weight
    for call in (lambda: updater.update_by_name("0.weight", new), lambda: updater.update_by_ref(before, new)):
        with pytest.raises(ConfigError, match=rf"0\.weight has {what} .*enforce_tensor_consistency=False"):
            call()
    assert model[0].weight is before
    updater.update_by_name("0.weight", new, enforce_tensor_consistency=False)
    assert getattr(model[1].weight, what) == getattr(new, what)


def test_gradients_can_be_turned_off_and_on_again(model):
    model[1].bias.requires_grad_(False)
    updater = ModTensorUpdater(model, disable_requires_grad=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    updater.update_by_name("2.weight", torch.ones(8))
    updater.restore_require_grad()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"0.weight", "2.weight", "2.bias"}


def test_a_tensor_that_is_not_there_is_refused(model):
    with pytest.raises(ConfigError, match=r"shape \(2,\) is neither"):
        ModTensorUpdater(model).update_by_ref(torch.ones(2), torch.ones(2))
    assert ModTensorUpdater.split_param_name("a.b.weight") == ("a.b", "weight")
    assert ModTensorUpdater.split_param_name("weight") == ("", "weight")
