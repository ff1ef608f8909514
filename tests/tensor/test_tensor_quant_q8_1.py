"""Q8_1 against gguf, numpy and the decoder of `.dat` files."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from t2n_hf.contract import InferenceTarget
from t2n_hf.errors import ConfigError, QuantizationError
from t2n_hf.nnef.dat import decode_blocks, read_dat, read_header
from t2n_hf.tensor import QScalePerGroupF16
from t2n_hf.tensor.opaque import materialised_counts
from t2n_hf.tensor.quant import QTensorTractQ81


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fields(weight):
    """Scales, sums and quants of the blocks, by numpy."""
    blocks = weight.q8_1.numpy()
    return blocks[..., :2].copy().view("<f2"), blocks[..., 2:4].copy().view("<f2"), blocks[..., 4:].view(np.int8)


def test_scales_and_quants_are_those_of_ggufs_8_bits():
    values = noise(40, 96).unflatten(-1, (-1, 32))
    values[..., 7] = 127 * 0.03125  # a scale that f16 holds exactly, so that none is rounded
    floats = values.clamp(-127 * 0.03125, 127 * 0.03125).flatten(-2)
    theirs = gguf.quants.quantize(floats.numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(40, 3, 34)
    scales, _, quants = fields(QTensorTractQ81.quantize(floats))
    np.testing.assert_array_equal(scales, theirs[..., :2].copy().view("<f2"))
    # gguf rounds halves away from zero, torch to even: neither is nearer.
    assert (quants != theirs[..., 2:].view(np.int8)).mean() < 0.001


def test_quants_are_the_nearest_under_the_stored_scale_and_the_sum_is_kept():
    floats = noise(50, 64)
    scales, sums, quants = fields(QTensorTractQ81.quantize(floats))
    groups = floats.numpy().reshape(50, 2, 32)
    np.testing.assert_array_equal(scales[..., 0], (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16))
    steps = scales.astype(np.float32)
    assert (np.abs(quants * steps - groups) <= 0.5001 * steps).all()
    np.testing.assert_array_equal(sums, (quants.sum(axis=-1, keepdims=True) * steps).astype(np.float16))


def test_values_are_those_of_the_file_form(tmp_path):
    weight = QTensorTractQ81.quantize(noise(9, 64).to(torch.bfloat16))
    weight.write_in_file(tmp_path, "w")
    header = read_header(tmp_path / "w.dat")
    assert (header.format, header.shape, header.nbytes) == ("q8_1", (9, 64), 9 * 2 * 36)
    expected = decode_blocks(weight.q8_1.numpy(), "q8_1").reshape(9, 64)
    np.testing.assert_array_equal(read_dat(tmp_path / "w.dat"), expected)
    assert torch.equal(weight.to(torch.float32).to_base_tensor(), torch.from_numpy(expected))
    assert torch.equal(weight.to_base_tensor(), torch.from_numpy(expected).to(torch.bfloat16))
    payload = QTensorTractQ81.dat_payload(weight.to_offload_state(), InferenceTarget())
    assert b"".join(payload.chunks()) == weight.q8_1.numpy().tobytes()


def test_extreme_blocks_are_held_exactly_or_refused_by_name():
    floats = noise(4, 64)
    floats[0, :32] = 0
    floats[1, :32] *= 1e-8
    floats[2, :32] = 1e-5 * torch.linspace(-1, 1, 32)  # its scale is rounded down by a quarter in f16
    values = QTensorTractQ81.quantize(floats).to_base_tensor()
    assert not values[0, :32].any()
    assert bool(torch.isfinite(values).all())
    assert float((values[2, :32] - floats[2, :32]).abs().max()) <= 2.5e-6
    largest = torch.full((1, 32), 127 * 65504.0)
    blocks = QTensorTractQ81.quantize(largest)
    assert torch.equal(blocks.to_base_tensor(), largest)
    assert fields(blocks)[1].item() == 65504  # the sum, which f16 cannot hold
    with pytest.raises(QuantizationError, match=r"layer\.weight .*beyond 65504"):
        QTensorTractQ81.quantize(largest * 1.01, name="layer.weight")
    assert "48 values" in QTensorTractQ81.refuses((64, 48), torch.float32)


def test_rows_and_products_never_make_all_of_it_dense():
    weight = QTensorTractQ81.quantize(noise(3000, 256))
    dense = weight.to_base_tensor()
    before = materialised_counts()
    ids = torch.tensor([[0, 2999, 5], [7, 7, 1]])
    assert torch.equal(F.embedding(ids, weight), dense[ids])
    assert torch.equal(weight[10:2000:7], dense[10:2000:7])
    x = noise(3, 256, seed=1)
    torch.testing.assert_close(F.linear(x, weight, dense[:, 0]), F.linear(x, dense, dense[:, 0]))
    many = torch.arange(3000).repeat(2)
    assert torch.equal(F.embedding(many, weight), dense[many])
    torch.testing.assert_close(x @ weight.T, x @ dense.T)
    assert materialised_counts() == before


def test_experts_are_taken_by_index_over_the_same_memory():
    weight = QTensorTractQ81.quantize(noise(3, 64, 32))
    weight.name = "experts.down_proj"
    one = weight[1]
    assert type(one) is QTensorTractQ81
    assert one.name == "experts.down_proj[1]"
    assert one.q8_1.data_ptr() == weight.q8_1[1].data_ptr()
    assert torch.equal(one.to_base_tensor(), weight.to_base_tensor()[1])
    assert torch.equal(weight[-1].to_base_tensor(), weight.to_base_tensor()[2])
    with pytest.raises(IndexError, match="size 3"):
        weight[3]


def test_a_scheme_of_ones_own_is_kept():
    floats = noise(4, 64)
    scheme = QScalePerGroupF16.fitted(floats, group_size=32, n_bits=8)
    weight = QTensorTractQ81(floats, scheme, torch.float32)
    expected = scheme.dequantize(scheme.quantize_as_u8(floats), torch.float32)
    assert torch.equal(weight.decompress(), expected)
    assert torch.equal(weight.decompress_to_u8(), scheme.quantize_as_u8(floats))
    assert torch.equal(weight.qscheme.scale, scheme.scale)
    assert torch.equal(weight.to_base_tensor(), expected)
    with pytest.raises(ConfigError, match="n_bits=8"):
        QTensorTractQ81(floats, QScalePerGroupF16.fitted(floats))
