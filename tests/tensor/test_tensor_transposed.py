"""A weight of the other orientation, over a packed one."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from t2n_hf.errors import FormatError, InPlaceError, UnknownTagError
from t2n_hf.registry import resolve_offload_state
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly
from t2n_hf.tensor.opaque import materialised_counts
from t2n_hf.tensor.transposed import TransposedTensor


@pytest.fixture
def floats():
    return torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weight(floats):
    inner = QTensorTractScaleOnly.quantize(floats.T.contiguous(), name="h.0.attn.c_attn.weight")
    return nn.Parameter(TransposedTensor.over(inner), requires_grad=False)


def test_values_and_shape_are_those_of_the_inner_tensor_turned(weight):
    assert weight.shape == (64, 96)
    assert torch.equal(weight.to_base_tensor(), weight.inner.to_base_tensor().T)
    assert weight.opaque_nbytes == weight.inner.opaque_nbytes
    assert weight.name == "h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.matmul(x, w),
        lambda x, w: x[0].mm(w),
        lambda x, w: torch.mm(x[0], w),
        lambda x, w: torch.addmm(torch.ones(96), x[0], w),
        lambda x, w: torch.addmm(torch.ones(96), x[0], w, beta=0.5, alpha=2),
        lambda x, w: torch.ones(96).addmm(x[0], w),
        lambda x, w: x[0, 0] @ w,
        lambda x, w: torch.nn.functional.linear(x, w.T),
    ],
)
def test_products_need_no_dense_weight(weight, product):
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    before = materialised_counts()
    found = product(x, weight)
    assert materialised_counts() == before
    torch.testing.assert_close(found, product(x, weight.to_base_tensor()))


def test_conv1d_computes_with_it(weight):
    layer = Conv1D(96, 64)
    layer.weight = weight
    x = torch.randn(2, 5, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    layer(x).sum().backward()
    (y @ weight.to_base_tensor() + layer.bias).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_copies_casts_and_moves_reach_the_inner_tensor(weight):
    twin = copy.deepcopy(weight)
    assert isinstance(twin, nn.Parameter)
    assert torch.equal(twin, weight)
    assert twin.inner is not weight.inner
    half = weight.to(torch.bfloat16)
    assert type(half.inner) is QTensorTractScaleOnly
    assert half.inner.dtype == half.dtype == torch.bfloat16
    assert weight.to("meta").inner.device.type == "meta"
    assert weight.with_compute("fast").inner.compute == "fast"
    assert isinstance(TransposedTensor(weight, requires_grad=False), nn.Parameter)


def test_the_state_holds_the_inner_state_and_comes_back(weight):
    state = weight.to_offload_state()
    assert set(state["tensors"]) == {"q4_0"}
    again = resolve_offload_state(state).from_offload_state(state, "cpu")
    assert type(again) is TransposedTensor
    assert torch.equal(again, weight)
    assert weight.with_compute("fast").to_private_state()["meta"]["inner_meta"]["compute"] == "fast"


def test_a_damaged_state_is_refused(weight):
    state = weight.to_offload_state()
    with pytest.raises(FormatError, match="'inner_tag'"):
        TransposedTensor.from_offload_state({**state, "meta": {}})
    with pytest.raises(UnknownTagError, match=r"inside a transposed weight: .*'nobody\.has\.v1'"):
        TransposedTensor.from_offload_state({**state, "meta": {"inner_tag": "nobody.has.v1"}})


def test_experts_are_taken_by_index():
    inner = QTensorTractScaleOnly.quantize(torch.randn(3, 96, 64))
    experts = TransposedTensor.over(inner)
    assert experts.shape == (3, 64, 96)
    assert type(experts[1]) is TransposedTensor
    assert torch.equal(experts[1].to_base_tensor(), inner.to_base_tensor()[1].T)
    assert torch.equal(experts[1, 2].clone(), inner.to_base_tensor()[1].T[2])


def test_offloaded_it_stays_packed(weight):
    offloaded = OffloadedTensor.from_original_tensor(weight, "w")
    x = torch.randn(2, 64)
    assert offloaded.inner_class is TransposedTensor
    assert offloaded.nbytes_loaded == weight.opaque_nbytes
    assert torch.equal(x @ offloaded, x @ weight)


def test_no_write_is_lost(weight):
    before = weight.to_base_tensor()
    for write in (lambda: weight.mul_(2), lambda: weight[0].zero_(), lambda: weight.T[0].zero_()):
        with pytest.raises(InPlaceError, match=r"h\.0\.attn"):
            write()
    assert torch.equal(weight.to_base_tensor(), before)
