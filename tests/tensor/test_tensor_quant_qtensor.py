"""QTensor under any scheme: its state, on disk, in a model; and what cannot be described is refused."""

import copy
import json

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from transformers import AutoModelForCausalLM

import t2n_hf
from t2n_hf.errors import ConfigError, FormatError, QuantizationError, UnsupportedOpError
from t2n_hf.registry import resolve_offload_state
from t2n_hf.store.state import read_state, write_state
from t2n_hf.tensor import OffloadedTensor, QScalePerGroupF16, QTensor, QTensorTract, QTensorTractScaleOnly
from t2n_hf.tensor.quant import (
    BitPacking,
    QScheme,
    U8Compressor,
    ZlibCompression,
    fp_to_tract_q4_0_with_min_max_calibration,
    qscale_per_group_f16_min_max_calibration,
)


class OneScale(QScheme):
    """Has no name."""

    def quantize_as_u8(self, fp_tensor):
        return (fp_tensor > 0).to(torch.uint8)

    def dequantize(self, u8_tensor, target_dtype):
        return u8_tensor.to(target_dtype) * 2 - 1


class NamedSigns(OneScale):
    """Has one, and holds a tensor."""

    STATE_NAME = "test_signs"

    def __init__(self, size=None):
        self.size = torch.tensor([1.5]) if size is None else size

    def dequantize(self, u8_tensor, target_dtype):
        return super().dequantize(u8_tensor, target_dtype) * self.size.to(target_dtype)

    @classmethod
    def from_state(cls, meta, tensors):
        return cls(tensors["size"])


@pytest.fixture
def floats():
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def tensors_of(floats):
    """A QTensor of each kind."""
    two = QScalePerGroupF16.fitted(floats, group_size=16, n_bits=2)
    eight = QScalePerGroupF16.fitted(floats, group_size=64, n_bits=8)
    yield QTensor(floats, two, torch.bfloat16, [BitPacking(2)])
    yield QTensor(floats, eight, torch.float32, [ZlibCompression(9)])
    yield QTensor(floats, two, torch.float16, [BitPacking(4), ZlibCompression()])
    yield QTensor(floats, NamedSigns(), torch.float32, [BitPacking(1)])
    yield QTensor(floats, eight)


@pytest.mark.parametrize("number", range(5))
def test_a_state_survives_a_file(floats, number, tmp_path):
    tensor = list(tensors_of(floats))[number]
    state = tensor.to_offload_state()
    assert json.loads(json.dumps(state["meta"])) == state["meta"]
    write_state(tmp_path / "state.safetensors", state)
    stored = read_state(tmp_path / "state.safetensors")
    assert resolve_offload_state(stored) is QTensor
    again = QTensor.from_offload_state(stored, "cpu")
    assert (again.shape, again.dtype, again.opaque_nbytes) == (tensor.shape, tensor.dtype, tensor.opaque_nbytes)
    assert torch.equal(again.to_base_tensor(), tensor.to_base_tensor())


@pytest.mark.parametrize("number", range(5))
def test_offloaded_it_stays_packed(floats, number):
    tensor = list(tensors_of(floats))[number]
    offloaded = OffloadedTensor.from_original_tensor(tensor, "w")
    assert offloaded.inner_class is QTensor
    assert torch.equal(offloaded.to_base_tensor(), tensor.to_base_tensor())
    x = torch.randn(3, 64).to(tensor.dtype)
    assert torch.equal(F.linear(x, offloaded), F.linear(x, tensor.to_base_tensor()))


def test_copies_and_casts_keep_values_and_bytes(floats):
    for tensor in tensors_of(floats):
        expected = tensor.to(torch.float32).to_base_tensor()
        for other in (copy.deepcopy(tensor), tensor.clone(), tensor.detach(), tensor.to_device("cpu")):
            assert type(other) is QTensor
            assert torch.equal(other.to(torch.float32).to_base_tensor(), expected)
            assert other.opaque_nbytes == tensor.opaque_nbytes


def test_accelerate_and_state_dicts_can_set_it(floats):
    for tensor in tensors_of(floats):
        layer, other = (nn.Linear(64, 6, bias=False) for _ in range(2))
        layer.weight = nn.Parameter(tensor, requires_grad=False)
        value = layer.state_dict()["weight"]
        set_module_tensor_to_device(layer, "weight", "meta")
        set_module_tensor_to_device(layer, "weight", "cpu", value=value)
        other.load_state_dict(layer.state_dict(), assign=True)
        for found in (layer.weight, other.weight, copy.deepcopy(layer).weight):
            assert type(found) is QTensor
            assert isinstance(found, nn.Parameter)
            assert torch.equal(found.to_base_tensor(), tensor.to_base_tensor())


def test_a_model_with_one_is_saved_and_reloaded(tmp_path):
    model = models.m2()
    layer = model.model.layers[1].mlp.down_proj
    scheme = QScalePerGroupF16.fitted(layer.weight.detach(), group_size=64, n_bits=2)
    source = models.saved(model, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=t2n_hf.T2NConfig()).eval()
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(QTensor(layer.weight, scheme, torch.float32, [BitPacking(2)]), requires_grad=False)
    expected = model(models.prompt()).logits
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert type(again.model.layers[1].mlp.down_proj.weight) is QTensor
    assert torch.equal(again(models.prompt()).logits, expected)
    on_disk = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": "disk"}).eval()
    assert torch.equal(on_disk(models.prompt()).logits, expected)


def test_what_has_no_name_is_refused_by_its_class(floats):
    class Reversed(U8Compressor):
        def compress(self, u8_tensor):
            return u8_tensor.flip(-1)

        decompress = compress

    with pytest.raises(UnsupportedOpError, match="OneScale has no STATE_NAME"):
        QTensor(floats, OneScale()).to_offload_state()
    scheme = QScalePerGroupF16.fitted(floats)
    with pytest.raises(UnsupportedOpError, match="Reversed has no STATE_NAME"):
        OffloadedTensor.from_original_tensor(QTensor(floats, scheme, u8_compressors=[Reversed()]), "w")
    assert torch.equal(
        QTensor(floats, scheme, u8_compressors=[Reversed()]).decompress(), QTensor(floats, scheme).decompress()
    )


def test_a_class_of_ones_own_does_not_take_over_the_state_of_its_base(floats):
    class Mine(QTensor):
        pass

    with pytest.raises(UnsupportedOpError, match="Mine derives from QTensor"):
        Mine(floats, QScalePerGroupF16.fitted(floats)).to_offload_state()


def test_meta_that_json_cannot_hold_is_refused(floats):
    class Strange(OneScale):
        STATE_NAME = "test_strange"

        def state_meta(self):
            return {"kind": {1, 2}}

    with pytest.raises(UnsupportedOpError, match="JSON cannot hold"):
        QTensor(floats, Strange()).to_offload_state()


def test_two_classes_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"is .*NamedSigns already"):
        type("Other", (OneScale,), {"STATE_NAME": "test_signs"})


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["tensors"].pop("u8"),
        lambda state: state["tensors"].pop("scheme_scale"),
        lambda state: state["tensors"].update(u8=state["tensors"]["u8"].float()),
        lambda state: state["tensors"].update(u8=state["tensors"]["u8"][:-1]),
        lambda state: state["meta"].pop("shape"),
        lambda state: state["meta"].update(shape=[6, 63]),
        lambda state: state["meta"].update(shape=["6", 64]),
        lambda state: state["meta"].update(compressors=None),
        lambda state: state["meta"].update(compressors=[3]),
        lambda state: state["meta"].update(compressors=[]),
        lambda state: state["meta"].update(scheme={"name": "os.system"}),
        lambda state: state["meta"]["scheme"].pop("n_bits"),
    ],
)
def test_a_state_that_does_not_fit_together_is_refused(floats, change):
    state = next(tensors_of(floats)).to_offload_state()
    change(state)
    with pytest.raises(FormatError):
        QTensor.from_offload_state(state)


def test_torch_has_no_tensor_of_its_own_for_it(floats):
    with pytest.raises(UnsupportedOpError, match="quantize_as_u8"):
        QScalePerGroupF16.fitted(floats).quantize_as_torch(floats)


# ---- what torch_to_nnef calibrates with ---------------------------------------------------------------------------


def test_min_max_puts_the_largest_magnitude_at_the_end_of_the_range(floats):
    scheme = qscale_per_group_f16_min_max_calibration(floats, n_bits=4, group_size=32)
    largest = np.abs(floats.numpy().reshape(-1, 32)).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(scheme.scale.numpy(), (largest / np.float32(-8)).astype(np.float16))
    assert (scheme.n_bits, scheme.group_size) == (4, 32)


def test_a_percentile_clips(floats):
    scheme = qscale_per_group_f16_min_max_calibration(floats, n_bits=4, group_size=64, percentile=0.9)
    expected = np.quantile(np.abs(floats.numpy().reshape(-1, 64)), 0.9, axis=1, keepdims=True) / -8
    np.testing.assert_allclose(scheme.scale.float().numpy(), expected, rtol=1e-3)
    for percentile in (0, 1.5):
        with pytest.raises(ConfigError, match="percentile"):
            qscale_per_group_f16_min_max_calibration(floats, 4, 32, percentile)
    with pytest.raises(QuantizationError, match="groups of 60"):
        qscale_per_group_f16_min_max_calibration(floats, 4, 60)


def test_min_max_q4_0_acts_like_the_float_tensor(floats):
    weight = fp_to_tract_q4_0_with_min_max_calibration(nn.Parameter(floats.to(torch.bfloat16)))
    assert isinstance(weight, QTensorTract)
    assert (type(weight), weight.dtype) == (QTensorTractScaleOnly, torch.bfloat16)
    scheme = qscale_per_group_f16_min_max_calibration(floats.to(torch.bfloat16), 4, 32)
    expected = scheme.dequantize(scheme.quantize_as_u8(floats.to(torch.bfloat16)), torch.float32)
    assert torch.equal(weight.to(torch.float32).to_base_tensor(), expected)
    with pytest.raises(QuantizationError, match="48 values"):
        fp_to_tract_q4_0_with_min_max_calibration(torch.randn(4, 48))


# ---- the machine that decompresses --------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ARM64", "armv7l"])
def test_decompressing_for_arm_is_in_f16(floats, machine):
    scheme = QScalePerGroupF16.fitted(floats)
    weight = QTensorTractScaleOnly(floats, scheme, torch.float32, specific_machine=machine)
    quants = scheme.quantize_as_u8(floats).numpy().reshape(-1, 32).astype(np.float16) - np.float16(8)
    expected = (quants * scheme.scale.numpy()).astype(np.float32).reshape(6, 64)
    for twin in (weight, copy.deepcopy(weight), nn.Parameter(weight, requires_grad=False), weight.to("cpu")):
        np.testing.assert_array_equal(twin.decompress().numpy(), expected)
    again = QTensorTractScaleOnly.from_offload_state(weight.to_offload_state())
    np.testing.assert_array_equal(again.decompress().numpy(), expected)
    assert not np.array_equal(weight.to_base_tensor().numpy(), expected)


@pytest.mark.parametrize(
    ("here", "is_arm"), [("x86_64", False), ("aarch64", True), ("AMD64", False), ("riscv64", False)]
)
def test_by_default_it_decompresses_for_this_machine(floats, here, is_arm, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: here)
    weight = QTensorTractScaleOnly.quantize(floats)
    assert torch.equal(weight.decompress(), weight.to_base_tensor()) is not is_arm
    elsewhere = QTensorTractScaleOnly(floats, weight.qscheme, torch.float32, specific_machine="x86_64")
    assert torch.equal(elsewhere.decompress(), elsewhere.to_base_tensor())
