import pytest
import torch

from t2n_hf.errors import ConfigError, FormatError, QuantizationError
from t2n_hf.tensor import OffloadedTensor, QScalePerGroupF16, QTensor, QTensorTractScaleOnly
from t2n_hf.tensor.quant import (
    BitPacking,
    QTensorTractQ81,
    TernaryTensor,
    ZlibCompression,
    fp_to_tract_q4_0_with_min_max_calibration,
)


@pytest.mark.parametrize(
    "bad",
    [torch.ones(2, 3, device="meta"), torch.ones(2, 3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_what_has_no_dense_values_is_refused_by_name_and_nothing_is_changed(bad):
    with pytest.raises(FormatError, match=r"layer\.weight"):
        OffloadedTensor.from_original_tensor(bad, "layer.weight")
    weight = OffloadedTensor.from_original_tensor(torch.ones(2, 3), "layer.weight")
    with pytest.raises(FormatError, match=r"layer\.weight"):
        weight.set_(bad)
    with pytest.raises(FormatError, match=r"layer\.weight"):
        weight.data = bad
    assert weight.device == torch.device("cpu")
    assert torch.equal(weight.to_base_tensor(), torch.ones(2, 3))


def test_views_that_conjugate_or_negate_keep_their_values():
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    negated = conjugated.imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    for view in (conjugated, negated):
        assert torch.equal(OffloadedTensor.from_original_tensor(view, "view").to_base_tensor(), view)


@pytest.mark.parametrize("kind", [QTensorTractScaleOnly, QTensorTractQ81, TernaryTensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("importance", [None, torch.linspace(0.5, 2, 64)], ids=["plain", "weighted"])
def test_a_turned_weight_is_quantized_like_its_copy(kind, dtype, importance):
    turned = torch.randn(64, 5).to(dtype).T
    quantized = kind.quantize(turned, importance=importance)
    expected = kind.quantize(turned.contiguous(), importance=importance)
    assert torch.equal(quantized.to_base_tensor(), expected.to_base_tensor())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scheme_refuses_values_and_scales_that_are_not_finite(value):
    values = torch.ones(2, 32)
    values[1, 3] = value
    for make in (QTensor, QTensorTractScaleOnly):
        with pytest.raises(QuantizationError, match="1 of 64 values are NaN or infinite"):
            make(values, QScalePerGroupF16(32, torch.ones(2), 4))
    for make in (QScalePerGroupF16.fitted, fp_to_tract_q4_0_with_min_max_calibration):
        with pytest.raises(QuantizationError, match="NaN, infinite or beyond 65504"):
            make(values)
    with pytest.raises(QuantizationError, match="NaN, infinite or beyond 65504"):
        QScalePerGroupF16.fitted(torch.full((1, 32), 1e30))


def test_a_compressed_weight_without_values_keeps_its_shape():
    values = torch.randn(4, 64)
    weight = QTensor(values, QScalePerGroupF16.fitted(values), torch.float16, [BitPacking(4), ZlibCompression()])
    for bare in (weight.to("meta"), QTensor.from_offload_state(weight.to_offload_state(), "meta")):
        dense = bare.to_base_tensor()
        assert (dense.device.type, dense.shape, dense.dtype) == ("meta", weight.shape, torch.float16)


@pytest.mark.parametrize("shape", [None, (0,)], ids=str)
def test_no_byte_ranges_are_no_tensor(shape):
    with pytest.raises(ConfigError, match=r"layer\.weight: got no byte ranges"):
        OffloadedTensor.from_byte_range([], "layer.weight", shape=shape)
