"""Schemes against plain arithmetic, and QTensor over any of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.errors import ConfigError, InPlaceError, QuantizationError, UnsupportedOpError
from t2n_hf.tensor import QScalePerGroupF16, QTensor
from t2n_hf.tensor.quant import QScheme, U8Compressor


class PairsInOneByte(U8Compressor):
    """Two 4-bit values in each byte."""

    def compress(self, u8_tensor):
        return u8_tensor[..., ::2] | u8_tensor[..., 1::2] << 4

    def decompress(self, u8_tensor):
        return torch.stack((u8_tensor & 15, u8_tensor >> 4), dim=-1).flatten(-2)


@pytest.fixture
def floats():
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n_bits", [2, 4, 8])
def test_values_are_within_half_a_step(floats, n_bits):
    scheme = QScalePerGroupF16.fitted(floats, group_size=16, n_bits=n_bits)
    u8 = scheme.quantize_as_u8(floats)
    assert u8.dtype == torch.uint8
    assert int(u8.max()) < 2**n_bits
    values = scheme.dequantize(u8, torch.float32)
    step = scheme.scale.float().abs().expand(-1, 16).reshape(floats.shape)
    # The side of the range that is one step shorter may clip by up to one step more.
    assert bool(((values - floats).abs() <= step * 1.01).all())
    inside = (u8 > 0) & (u8 < 2**n_bits - 1)
    assert bool(((values - floats).abs() <= step * 0.51)[inside].all())


def test_the_largest_value_falls_on_the_longer_end(floats):
    scheme = QScalePerGroupF16.fitted(floats, group_size=32)
    u8 = scheme.quantize_as_u8(floats).view(-1, 32)
    assert bool((u8.min(dim=-1).values == 0).all())


def test_zeros_have_a_scale_of_zero_and_stay_zero():
    scheme = QScalePerGroupF16.fitted(torch.zeros(2, 32))
    assert torch.equal(scheme.dequantize(scheme.quantize_as_u8(torch.zeros(2, 32)), torch.float32), torch.zeros(2, 32))


def test_a_scale_factor_divides_the_scales(floats):
    scheme = QScalePerGroupF16.fitted(floats)
    assert torch.equal(scheme.clone_with_scale_factor(2).scale, scheme.scale / 2)
    assert "12 scales" in repr(scheme)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"n_bits": 0}, ConfigError), ({"n_bits": 9}, ConfigError), ({"group_size": 0}, ConfigError)],
    ids=["no bits", "9 bits", "no group"],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(error, match="expected"):
        QScalePerGroupF16(**{"group_size": 32, "n_bits": 4, "scale": torch.ones(2), **options})


def test_shapes_that_do_not_divide_are_refused(floats):
    with pytest.raises(QuantizationError, match="groups of 60"):
        QScalePerGroupF16.fitted(floats, group_size=60)
    with pytest.raises(QuantizationError, match="12 groups of 32 values, but the scheme has 2 scales"):
        QScalePerGroupF16(32, torch.ones(2), 4).quantize_as_u8(floats)


@pytest.mark.parametrize("compressors", [None, [PairsInOneByte()]], ids=["bytes", "pairs"])
def test_a_qtensor_acts_as_its_values_under_any_scheme(floats, compressors):
    scheme = QScalePerGroupF16.fitted(floats, group_size=16)
    tensor = QTensor(floats, scheme, torch.bfloat16, compressors)
    expected = scheme.dequantize(scheme.quantize_as_u8(floats), torch.bfloat16)
    assert torch.equal(tensor.decompress(), expected)
    assert torch.equal(tensor.decompress_to_u8(), scheme.quantize_as_u8(floats))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(F.linear(x, tensor), F.linear(x, expected))
    assert tensor.opaque_nbytes == 6 * 64 // (2 if compressors else 1) + 2 * 24
    parameter = nn.Parameter(tensor, requires_grad=False)
    assert type(parameter) is QTensor
    assert isinstance(QTensor(parameter, requires_grad=False), nn.Parameter)
    assert torch.equal(
        parameter.to(torch.float32).to_base_tensor(), scheme.dequantize(tensor.decompress_to_u8(), torch.float32)
    )
    assert parameter.to_device("meta").qscheme.scale.device.type == "meta"
    assert parameter.qscheme.scale.device.type == "cpu"
    with pytest.raises(InPlaceError):
        parameter.mul_(2)


def test_a_qtensor_alone_has_no_file_form(floats, tmp_path):
    with pytest.raises(UnsupportedOpError, match="use QTensorTractScaleOnly"):
        QTensor(floats, QScalePerGroupF16.fitted(floats)).write_in_file(tmp_path, "w")


def test_schemes_and_compressors_are_abstract():
    with pytest.raises(TypeError, match="abstract"):
        QScheme()
    with pytest.raises(TypeError, match="abstract"):
        U8Compressor()
