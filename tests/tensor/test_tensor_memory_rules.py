import numpy as np
import pytest
import torch

from t2n_hf.errors import InPlaceError
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly, TensorResidencyPool
from t2n_hf.tensor.transposed import TransposedTensor

VALUES = torch.arange(128.0).reshape(4, 32) - 7


def offloaded():
    return OffloadedTensor.from_original_tensor(VALUES.clone(), "layer.weight")


def packed():
    weight = QTensorTractScaleOnly.quantize(VALUES)
    weight.name = "layer.weight"
    return weight


BOTH = pytest.mark.parametrize("make", [offloaded, packed], ids=["offloaded", "packed"])


@BOTH
def test_other_libraries_are_given_the_values_by_dlpack(make):
    weight = make()
    expected = weight.to_base_tensor()
    assert torch.equal(torch.from_dlpack(weight), expected)
    assert np.array_equal(np.from_dlpack(weight), expected.numpy())


@BOTH
def test_a_numpy_array_of_a_weight_cannot_be_written_to(make):
    weight = make()
    with TensorResidencyPool() as pool, pool.scope():
        before = weight.to_base_tensor().clone()
        for array in (weight.numpy(), np.asarray(weight)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        assert torch.equal(weight.to_base_tensor(), before)
    copied = np.asarray(weight).copy()
    copied[0] = 1
    assert (copied[0] == 1).all()


@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "in a pool"])
def test_what_torch_writes_through_a_view_or_by_pointer_persists(pooled):
    pool = TensorResidencyPool()
    weight = offloaded()
    if pooled:
        weight.bind_pool(pool)
        weight.reload()
    expected = VALUES.clone().fill_diagonal_(3).apply_(lambda value: value + 1)
    assert weight.fill_diagonal_(3) is weight
    assert weight.apply_(lambda value: value + 1) is weight
    pool.close()
    assert torch.equal(weight.detach().to_base_tensor(), expected)


@pytest.mark.parametrize("write", [lambda w: w.fill_diagonal_(0.0), lambda w: w.apply_(abs)], ids=["view", "pointer"])
def test_what_cannot_persist_is_refused_by_name(write):
    with pytest.raises(InPlaceError, match=r"layer\.weight"):
        write(packed())
    with pytest.raises(InPlaceError, match=r"layer\.weight"):
        write(OffloadedTensor.from_original_tensor(packed(), "layer.weight"))


@BOTH
def test_a_single_value_is_formatted_as_a_number(make):
    weight = make()
    assert f"{weight[1, 3]:.2f}" == f"{float(weight.to_base_tensor()[1, 3]):.2f}"
    assert f"{weight.view(-1)[5]:+.1e}" == f"{float(weight.to_base_tensor().view(-1)[5]):+.1e}"
    assert f"{OffloadedTensor.from_original_tensor(torch.tensor(2.5), 'scale'):.3f}" == "2.500"
    assert "layer.weight" in f"{weight}"


def test_tensors_like_one_without_axes_can_be_made():
    scale = OffloadedTensor.from_original_tensor(torch.tensor(2.5), "scale")
    assert torch.equal(torch.zeros_like(scale), torch.tensor(0.0))
    assert torch.equal(scale.new_zeros(3), torch.zeros(3))
    assert torch.equal(torch.full_like(scale, 4), torch.tensor(4.0))


def test_a_turned_weight_of_three_axes_takes_masks_of_its_own_shape():
    turned = TransposedTensor.over(QTensorTractScaleOnly.quantize(torch.randn(3, 4, 32)))
    values = turned.to_base_tensor()
    assert torch.equal(turned[values > 0], values[values > 0])
    assert torch.equal(turned[torch.tensor([True, False, True])], values[[0, 2]])
    assert torch.equal(turned[torch.tensor(2)].to_base_tensor(), values[2])
