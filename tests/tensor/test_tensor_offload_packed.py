import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.errors import FormatError, UnknownTagError, UnsupportedOpError
from t2n_hf.residency import TensorResidencyPool
from t2n_hf.tensor import OffloadedTensor, OpaqueTensor, QTensorTractScaleOnly
from t2n_hf.tensor.opaque import compute_mode, materialised_counts
from t2n_hf.tensor.transposed import TransposedTensor


@pytest.fixture
def packed():
    return QTensorTractScaleOnly.quantize(torch.randn(64, 96), name="w")


def offloaded(packed, **options):
    return OffloadedTensor.from_state(packed.to_offload_state(), "w", **options)


def test_a_packed_value_stays_packed_on_disk_in_memory_and_in_the_pool(packed):
    weight = offloaded(packed)
    assert weight.inner_class is QTensorTractScaleOnly
    assert weight.nbytes_loaded == packed.opaque_nbytes == 64 * 3 * 18
    assert type(weight.reload()) is QTensorTractScaleOnly
    with TensorResidencyPool() as pool:
        pool.resolve(weight)
        assert pool.resident_bytes == 64 * 3 * 18


@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_a_product_uses_the_rule_of_the_packed_class(packed, compute):
    weight = offloaded(packed, dtype=torch.bfloat16, compute=compute)
    resident = packed.to(torch.bfloat16).with_compute(compute)
    x = torch.randn(2, 96, dtype=torch.bfloat16)
    before = materialised_counts()
    assert torch.equal(F.linear(x, weight), F.linear(x, resident))
    assert torch.equal(x @ weight.T, F.linear(x, resident))
    assert torch.equal(F.embedding(torch.tensor([1, 5]), weight), F.embedding(torch.tensor([1, 5]), resident))
    assert materialised_counts() == before
    with compute_mode("exact"):
        assert torch.equal(F.linear(x, weight), F.linear(x, packed.to(torch.bfloat16)))


def test_a_kernels_layout_is_spilled_once_and_canonical_bytes_come_back(packed, monkeypatch):
    fast = packed.with_compute("fast")
    if not fast.pack_for_kernel():
        pytest.skip("no int4 kernel here")
    canonical = QTensorTractScaleOnly.quantize(packed.to_base_tensor()).to_offload_state()["tensors"]["q4_0"]
    weight = OffloadedTensor.from_original_tensor(fast, "w")
    loaded = weight.reload()
    assert loaded.compute == "fast"
    assert weight.nbytes_loaded == loaded.opaque_nbytes
    state = weight.stored_state()
    assert state["tag"] == QTensorTractScaleOnly.OFFLOAD_STATE_TAG
    assert torch.equal(state["tensors"]["q4_0"], packed.to_offload_state()["tensors"]["q4_0"])
    assert canonical.shape == state["tensors"]["q4_0"].shape


def test_a_gradient_reaches_the_input_of_a_packed_weight(packed):
    x = torch.randn(3, 96, requires_grad=True)
    F.linear(x, offloaded(packed)).sum().backward()
    assert torch.allclose(x.grad, packed.to_base_tensor().sum(0).expand(3, 96), atol=1e-5)


def test_packed_experts_are_indexed_and_a_transposed_weight_multiplies():
    experts = QTensorTractScaleOnly.quantize(torch.randn(3, 8, 32))
    weight = OffloadedTensor.from_original_tensor(experts, "experts")
    x = torch.randn(2, 32)
    assert isinstance(weight[1], QTensorTractScaleOnly)
    assert torch.equal(F.linear(x, weight[1]), F.linear(x, experts[1]))
    turned = TransposedTensor.over(QTensorTractScaleOnly.quantize(torch.randn(8, 32)))
    conv = OffloadedTensor.from_original_tensor(turned, "conv")
    assert conv.shape == (32, 8)
    assert torch.equal(torch.addmm(torch.ones(8), x, conv), torch.addmm(torch.ones(8), x, turned))
    assert torch.equal(x @ conv, x @ turned)
    assert conv.inner_class is TransposedTensor


def test_casting_and_copying_keep_the_packed_bytes(packed):
    weight = offloaded(packed)
    for other in (weight.to(torch.float16), weight.clone(), nn.Parameter(weight, requires_grad=False)):
        assert other.inner_class is QTensorTractScaleOnly
        assert torch.equal(other.reload().q4_0, packed.q4_0)
        assert torch.equal(other.to_base_tensor(), packed.to(other.dtype).to_base_tensor())
    shown = OffloadedTensor.over(packed, torch.float64, "w")
    assert torch.equal(shown.to_base_tensor(), packed.to(torch.float64).to_base_tensor())


def test_states_that_cannot_be_rebuilt_are_refused(packed):
    state = packed.to_offload_state()
    with pytest.raises(UnknownTagError, match=r"acme\.int3\.v1"):
        OffloadedTensor.from_state({**state, "tag": "acme.int3.v1"}, "w")
    with pytest.raises(FormatError):
        OffloadedTensor.from_state({**state, "tensors": {}}, "w")


def test_an_opaque_class_without_a_state_cannot_be_offloaded():
    class Stateless(OpaqueTensor):
        def _to_base_tensor(self):
            return torch.zeros(2, 2)

        def _parts(self):
            return {}

    with pytest.raises(UnsupportedOpError, match="w: a Stateless has no offload state"):
        OffloadedTensor.from_original_tensor(Stateless._shell((2, 2), torch.float32, "cpu"), "w")


def test_what_is_offloaded_already_can_be_offloaded_turned_or_again(tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(4, 32))
    first = OffloadedTensor.from_original_tensor(packed, "first", tmp_path)
    again = OffloadedTensor.from_original_tensor(first, "again", tmp_path)
    turned = OffloadedTensor.from_original_tensor(first.T, "turned", tmp_path)
    assert again.inner_class is QTensorTractScaleOnly
    assert torch.equal(again.to_base_tensor(), packed.to_base_tensor())
    assert torch.equal(turned.to_base_tensor(), packed.to_base_tensor().T)
    plain = OffloadedTensor.from_original_tensor(torch.ones(4, 32), "plain", tmp_path)
    with pytest.raises(UnsupportedOpError, match="plain turns plain values"):
        OffloadedTensor.from_original_tensor(plain.T, "turned", tmp_path)


def test_reload_on_another_device_changes_nothing_about_the_tensor(tmp_path):
    weight = OffloadedTensor.from_original_tensor(torch.ones(4, 32), "w", tmp_path)
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool)
        shape = weight.reload("meta")
        assert shape.is_meta
        assert (shape.shape, shape.dtype) == (weight.shape, weight.dtype)
        assert not pool.is_resident(weight)
        assert (weight.target_device, weight.device) == (torch.device("cpu"),) * 2
        assert weight.reload().device == torch.device("cpu")
        assert weight.reload(torch.device("cpu")).equal(torch.ones(4, 32))
    moved = weight.to("meta")
    assert moved.target_device == torch.device("meta")
    assert not moved.is_meta
