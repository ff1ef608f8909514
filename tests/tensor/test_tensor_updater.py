import pytest
import torch
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.tensor.updater import ModTensorUpdater


@pytest.fixture
def model():
    made = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.BatchNorm1d(8))
    made[1].weight = made[0].weight
    return made


def test_a_tied_tensor_has_one_entry_and_all_its_names(model):
    places = ModTensorUpdater(model).places_of(model[1].weight)
    assert [place.name for place in places] == ["0.weight", "1.weight"]
    assert len(list(ModTensorUpdater(model))) == len(list(model.parameters())) + len(list(model.buffers()))


def test_a_replaced_tensor_stays_tied_and_can_be_replaced_again(model):
    updater = ModTensorUpdater(model)
    old, new = model[0].weight, nn.Parameter(torch.ones(8, 4))
    updater.update_by_ref(old, new)
    assert model[0].weight is model[1].weight is new
    updater.update_by_ref(new, old)
    assert model[1].weight is old
    updater.update_by_ref(model[2].running_mean, torch.full((8,), 3.0))
    assert model[2].running_mean.tolist() == [3] * 8
    assert "2.running_mean" in dict(model.named_buffers())


def test_a_tensor_that_is_not_there_is_refused(model):
    with pytest.raises(ConfigError, match=r"shape \(2,\) is neither"):
        ModTensorUpdater(model).update_by_ref(torch.ones(2), torch.ones(2))
