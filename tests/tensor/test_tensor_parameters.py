"""Every class as a parameter: what accelerate, state dicts and deepcopy do with parameters works on it."""

import copy

import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.tensor import OffloadedTensor, OpaqueTensor, QScalePerGroupF16, QTensor, QTensorTractScaleOnly
from t2n_hf.tensor.quant import QTensorTractQ81, TernaryTensor
from t2n_hf.tensor.transposed import TransposedTensor

N, K = 32, 256


def values(seed=0):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def by_scheme(tensor):
    scales = (tensor.reshape(-1, 32).abs().amax(-1, keepdim=True) / -8).half()
    return QTensor(tensor, QScalePerGroupF16(32, scales, 4))


def turned(tensor):
    return TransposedTensor.over(QTensorTractScaleOnly.quantize(tensor.reshape(K, N)))


def offloaded(make):
    return lambda tensor: OffloadedTensor.from_original_tensor(make(tensor), "w")


PACKED = {
    "QTensor": by_scheme,
    "Q4_0": QTensorTractScaleOnly.quantize,
    "Q8_1": QTensorTractQ81.quantize,
    "ternary": TernaryTensor.quantize,
    "turned": turned,
}
MAKE = {
    **PACKED,
    "offloaded": offloaded(lambda tensor: tensor),
    **{f"offloaded {name}": offloaded(make) for name, make in PACKED.items()},
}
EVERY = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def linear(weight):
    module = nn.Linear(K, N, bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def plain(tensor):
    return tensor.to_base_tensor() if isinstance(tensor, OpaqueTensor) else tensor.detach()


@EVERY
def test_it_is_a_parameter_that_tells_what_it_holds(make):
    weight = linear(make(values())).weight
    assert isinstance(weight, nn.Parameter)
    parts = sum(part.nbytes for part in _tensors_inside(weight))
    assert weight.opaque_nbytes == parts
    assert weight.nbytes == N * K * 4
    if not isinstance(weight, OffloadedTensor):
        assert 0 < parts < N * K * 4 / 3


def _tensors_inside(value, seen=None):
    """Find plain tensors behind attributes, by what Python shows of an object, not by what the class says."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor) and not isinstance(value, OpaqueTensor):
        return [value]
    if isinstance(value, (list, tuple)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values()) if type(value).__module__.startswith("t2n_hf") else []
    return [tensor for part in inner for tensor in _tensors_inside(part, seen)]


@EVERY
def test_accelerate_puts_a_value_of_the_class_in_place(make):
    for target in (linear(make(values())), nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False, device="meta")):
        value = make(values(1))
        set_module_tensor_to_device(target, "weight", "cpu", value=value)
        assert type(target.weight) is type(value)
        assert isinstance(target.weight, nn.Parameter)
        assert torch.equal(plain(target.weight), plain(value))


@EVERY
def test_accelerate_puts_plain_values_in_place(make):
    module = linear(make(values()))
    set_module_tensor_to_device(module, "weight", "cpu", value=values(1))
    assert torch.equal(plain(module.weight), values(1))
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad


@EVERY
def test_accelerate_moves_it_and_casts_it(make):
    module = linear(make(values()))
    kind = type(module.weight)
    set_module_tensor_to_device(module, "weight", "cpu", value=make(values(1)), dtype=torch.bfloat16)
    assert type(module.weight) is kind
    assert module.weight.dtype is torch.bfloat16
    set_module_tensor_to_device(module, "weight", "meta")
    assert type(module.weight) is kind
    assert module.weight.device.type == "meta"
    value = make(values(2))
    set_module_tensor_to_device(module, "weight", "cpu", value=value)  # keeps the dtype
    assert torch.equal(plain(module.weight), plain(value.to(torch.bfloat16)))


@EVERY
@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_goes_into_the_same_class(make, assign):
    source, target = linear(make(values())), linear(make(values(1)))
    target.load_state_dict(source.state_dict(), assign=assign)
    assert type(target.weight) is type(source.weight)
    assert torch.equal(plain(target.weight), plain(source.weight))
    source_values = plain(source.weight)
    if assign:
        plain_target = nn.Linear(K, N, bias=False)
        plain_target.load_state_dict(source.state_dict(), assign=True)
        assert type(plain_target.weight) is type(source.weight)
    else:
        plain_target = nn.Linear(K, N, bias=False)
        plain_target.load_state_dict(source.state_dict())
        assert type(plain_target.weight) is nn.Parameter
    assert torch.equal(plain(plain_target.weight), source_values)


@EVERY
def test_plain_values_of_a_state_dict_replace_it_or_are_refused_by_name(make):
    target = linear(make(values()))
    target.load_state_dict({"weight": values(1)}, assign=True)
    assert torch.equal(plain(target.weight), values(1))
    target = linear(make(values()))
    before = plain(target.weight)
    if isinstance(target.weight, OffloadedTensor) and target.weight.inner_class is None:
        target.load_state_dict({"weight": values(1)})
        assert torch.equal(plain(target.weight), values(1))
        return
    with pytest.raises(RuntimeError, match=r'copying the parameter named "weight".*packed'):
        target.load_state_dict({"weight": values(1)})
    assert torch.equal(plain(target.weight), before)


@EVERY
def test_a_deep_copy_is_its_own(make):
    module = linear(make(values()))
    twin = copy.deepcopy(module)
    assert type(twin.weight) is type(module.weight)
    assert isinstance(twin.weight, nn.Parameter)
    before = plain(twin.weight)
    module.load_state_dict(linear(make(values(1))).state_dict())
    assert torch.equal(plain(twin.weight), before)
    assert not torch.equal(plain(module.weight), before)


@pytest.mark.parametrize("make", PACKED.values(), ids=PACKED)
def test_the_class_called_on_plain_values_alone_says_how_to_make_one(make):
    with pytest.raises(ConfigError, match="make one with quantize"):
        type(make(values()))(values())
