import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.tensor import (
    OffloadedTensor,
    OpaqueTensorRef,
    QTensorTractScaleOnly,
    find_opaque_ref_by_py_id,
    set_opaque_tensor_in_params_as_ref,
    trace_tensor_device_for_func,
)


@pytest.fixture
def model():
    made = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    packed = nn.Parameter(QTensorTractScaleOnly.quantize(made[0].weight.detach()), requires_grad=False)
    made[0].weight = made[1].weight = packed
    made[2].weight = nn.Parameter(OffloadedTensor.from_original_tensor(made[2].weight, "w"), requires_grad=False)
    return made


def test_a_model_of_references_computes_the_same(model):
    x = torch.randn(2, 32)
    expected = model(x)
    packed = model[0].weight
    set_opaque_tensor_in_params_as_ref(model)
    assert isinstance(model[0].weight, OpaqueTensorRef)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[1].weight is model[0].weight
    assert type(model[0].bias) is nn.Parameter
    assert model[0].weight.opaque_tensor is packed
    assert model[0].weight.nnef_name == packed.name == "0.weight"
    assert type(model[0].weight.meta_tensor) is torch.Tensor
    assert model[0].weight.meta_tensor.is_meta
    assert torch.allclose(model(x), expected, atol=1e-6)
    twin = copy.deepcopy(model)
    assert torch.allclose(twin(x), expected, atol=1e-6)
    assert twin[1].weight is twin[0].weight


def test_a_reference_is_found_by_either_id(model):
    set_opaque_tensor_in_params_as_ref(model)
    ref = model[2].weight
    assert find_opaque_ref_by_py_id(model, id(ref)) is ref
    assert find_opaque_ref_by_py_id(model, id(ref.opaque_tensor)) is ref
    with pytest.raises(ConfigError, match="no OpaqueTensorRef with id 7"):
        find_opaque_ref_by_py_id(model, 7)


@pytest.mark.parametrize(
    ("func", "device"),
    [
        (torch.Tensor.view, "meta"),
        (torch.Tensor.T.__get__, "meta"),
        (torch.transpose, "meta"),
        (torch.ops.aten.permute.default, "meta"),
        (torch.Tensor.shape.__get__, "meta"),
        (torch.nn.functional.embedding, "cpu"),
        (torch.Tensor.item, "cpu"),
        (torch.nn.functional.linear, None),
        (torch.matmul, None),
    ],
    # No text of a function: it can hold an address, and test processes must agree on the ids.
    ids=["view", "T", "transpose", "permute", "shape", "embedding", "item", "linear", "matmul"],
)
def test_views_are_traced_without_values(func, device):
    assert trace_tensor_device_for_func(func) == device


def test_shapes_come_without_values_and_values_on_demand(model, monkeypatch):
    set_opaque_tensor_in_params_as_ref(model)
    ref = model[0].weight
    values = ref.opaque_tensor.to_base_tensor()
    assert (ref + 0).equal(values)
    assert ref[torch.tensor([3])].equal(values[[3]])
    assert F.linear(torch.ones(2, 32), ref[3:5]).equal(F.linear(torch.ones(2, 32), values[3:5]))
    monkeypatch.setattr(QTensorTractScaleOnly, "to_base_tensor", None)
    assert ref.shape == (32, 32)
    assert ref.view(-1).shape == (1024,)
    assert ref.T.is_meta


def test_a_reference_must_look_like_what_it_stands_for():
    packed = QTensorTractScaleOnly.quantize(torch.randn(4, 32))
    for wrong in (torch.empty(4, 32), torch.empty(4, 64, device="meta")):
        with pytest.raises(ConfigError, match="expected a meta tensor of shape"):
            OpaqueTensorRef(wrong, packed)
