"""Compressors give back what they took, of any shape; damaged bytes are refused."""

import numpy as np
import pytest
import torch

from t2n_hf.errors import ConfigError, FormatError, QuantizationError
from t2n_hf.tensor.quant import BitPacking, U8Compressor, ZlibCompression

SHAPES = [(), (0,), (1,), (7,), (8,), (3, 5), (4, 0, 2), (2, 3, 11), (257,)]


def values(shape, n_bits, seed=0):
    return torch.randint(0, 1 << n_bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n_bits", [1, 2, 4])
def test_bits_come_back_in_their_shape(shape, n_bits):
    u8 = values(shape, n_bits)
    packed = BitPacking(n_bits).compress(u8)
    assert packed.dtype is torch.uint8
    assert packed.numel() == -(-u8.numel() * n_bits // 8) + 1 + 8 * len(shape)
    back = BitPacking(n_bits).decompress(packed)
    assert back.shape == u8.shape
    assert torch.equal(back, u8)


def test_one_bit_is_packed_as_numpy_packs_it():
    bits = values((3, 13), 1)
    packed = BitPacking(1).compress(bits)
    np.testing.assert_array_equal(packed[17:].numpy(), np.packbits(bits.numpy().reshape(-1), bitorder="little"))


def test_the_first_value_is_in_the_lowest_bits():
    assert BitPacking(4).compress(torch.tensor([1, 2, 3], dtype=torch.uint8))[9:].tolist() == [0x21, 0x03]
    assert BitPacking(2).compress(torch.tensor([1, 2, 3], dtype=torch.uint8))[9:].tolist() == [0b111001]


@pytest.mark.parametrize("n_bits", [0, 3, 8])
def test_bits_that_do_not_fill_bytes_are_refused(n_bits):
    with pytest.raises(ConfigError, match="1, 2 or 4"):
        BitPacking(n_bits)


def test_values_that_need_more_bits_are_refused():
    with pytest.raises(QuantizationError, match=r"below 4; got .*up to 4"):
        BitPacking(2).compress(torch.tensor([0, 4], dtype=torch.uint8))
    with pytest.raises(QuantizationError, match="int64"):
        BitPacking(2).compress(torch.tensor([0, 1]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_deflated_bytes_come_back_in_their_shape(shape):
    u8 = values(shape, 8)
    assert torch.equal(ZlibCompression().decompress(ZlibCompression().compress(u8)), u8)
    assert ZlibCompression(9).compress(torch.zeros(10_000, dtype=torch.uint8)).numel() < 100


@pytest.mark.parametrize("level", [-1, 10])
def test_a_level_out_of_range_is_refused(level):
    with pytest.raises(ConfigError, match="0 to 9"):
        ZlibCompression(level)


def damaged():
    """Name, compressor, bytes."""
    u8 = values((5, 7), 4)
    bits, deflated = BitPacking(4).compress(u8), ZlibCompression().compress(u8)
    bomb = torch.cat(
        (ZlibCompression().compress(u8)[:17], ZlibCompression().compress(torch.zeros(1 << 22, dtype=torch.uint8))[9:])
    )
    yield pytest.param(BitPacking(4), bits[:-1], id="bits cut short")
    yield pytest.param(BitPacking(4), torch.cat((bits, bits[:1])), id="too many bits")
    yield pytest.param(BitPacking(4), bits[:5], id="no shape")
    yield pytest.param(BitPacking(4), bits[:0], id="nothing")
    yield pytest.param(BitPacking(4), torch.full((2000,), 255, dtype=torch.uint8), id="rank of 255")
    yield pytest.param(ZlibCompression(), deflated[:-3], id="deflated, cut short")
    yield pytest.param(ZlibCompression(), deflated[:20], id="no stream")
    yield pytest.param(ZlibCompression(), bits, id="not deflated")
    yield pytest.param(ZlibCompression(), bomb, id="inflates to more than its shape")


@pytest.mark.parametrize(("compressor", "compressed"), list(damaged()))
def test_damaged_bytes_are_refused(compressor, compressed):
    with pytest.raises(FormatError):
        compressor.decompress(compressed)


@pytest.mark.parametrize("compressor", [BitPacking(2), ZlibCompression(3)], ids=["bits", "zlib"])
def test_a_compressor_is_described_in_json_and_rebuilt(compressor):
    again = U8Compressor.rebuilt(compressor.description(), {})
    assert type(again) is type(compressor)
    assert vars(again) == vars(compressor)
    with pytest.raises(FormatError, match="stored with"):
        U8Compressor.rebuilt({"name": compressor.STATE_NAME}, {})
