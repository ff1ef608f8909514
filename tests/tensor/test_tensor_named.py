import copy

import torch
from torch import nn

from t2n_hf.tensor import NamedTensor, QTensorTractScaleOnly, apply_name_to_tensor_in_module


def model():
    made = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32, bias=False))
    made[2].weight = made[0].weight
    return made.eval()


def test_every_parameter_and_buffer_gets_its_name_and_results_stay():
    made = model()
    x = torch.randn(4, 32)
    expected = made(x)
    apply_name_to_tensor_in_module(made)
    found = {name: t.nnef_name for name, t in (*made.named_parameters(), *made.named_buffers())}
    assert found == {name: name for name in found}
    assert {"0.weight", "0.bias", "1.running_mean", "1.weight"} <= set(found)
    assert isinstance(made[0].weight, NamedTensor)
    assert isinstance(made[0].weight, nn.Parameter)
    assert made[2].weight is made[0].weight
    result = made(x)
    assert torch.equal(result, expected)
    assert type(result) is torch.Tensor
    assert len(made.state_dict()) == 8


def test_names_given_twice_stay_and_opaque_tensors_keep_their_class():
    made = model()
    packed = QTensorTractScaleOnly.quantize(torch.randn(32, 32))
    made[0].weight = nn.Parameter(packed, requires_grad=False)
    apply_name_to_tensor_in_module(made)
    first = made[0].bias
    apply_name_to_tensor_in_module(made)
    assert made[0].bias is first
    assert isinstance(made[0].weight, QTensorTractScaleOnly)
    assert made[0].weight.name == "0.weight"


def test_copies_of_the_whole_keep_the_name():
    tensor = NamedTensor(torch.arange(4.0), "w")
    copies = [tensor.detach(), tensor.clone(), tensor.data, tensor.to(torch.float16), copy.deepcopy(tensor)]
    assert [t.nnef_name for t in copies] == ["w"] * 5
    assert type(tensor + 1) is torch.Tensor
    tensor.data = torch.zeros(4)
    assert tensor.tolist() == [0, 0, 0, 0]
    tensor.add_(1)
    assert tensor.nnef_name == "w"
    assert "'w'" in repr(tensor)


def test_a_named_parameter_shares_memory_and_trains():
    parameter = nn.Parameter(torch.ones(3))
    named = NamedTensor(parameter, "p")
    assert named.requires_grad
    (named * 2).sum().backward()
    assert named.grad.tolist() == [2, 2, 2]
    with torch.no_grad():
        named.mul_(3)
    assert parameter.tolist() == [3, 3, 3]
    twin = copy.deepcopy(named)
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad
