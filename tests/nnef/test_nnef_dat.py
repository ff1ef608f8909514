"""`.dat` files: their header, both ways, with numpy and the gguf package as independent truth."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from t2n_hf.errors import FormatError
from t2n_hf.nnef.dat import (
    HEADER_NBYTES,
    DatHeader,
    array_payload,
    dense_payload,
    q4_0_payload,
    q8_1_payload,
    read_dat,
    read_header,
    write_dat,
)

DENSE = {
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}


@pytest.mark.parametrize(("name", "numpy_name"), DENSE.items(), ids=DENSE)
def test_dense_values_come_back_as_they_were(tmp_path: Path, name: str, numpy_name: str):
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(numpy_name)
    write_dat(tmp_path / "w.dat", array_payload(values))
    back = read_dat(tmp_path / "w.dat")
    assert read_header(tmp_path / "w.dat").format == name
    assert back.dtype == values.dtype
    assert np.array_equal(back, values)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,) * 8], ids=str)
def test_unusual_shapes_come_back(tmp_path: Path, shape: tuple[int, ...]):
    write_dat(tmp_path / "w.dat", array_payload(np.ones(shape, np.float32)))
    assert read_dat(tmp_path / "w.dat").shape == shape


def test_a_transposed_array_is_written_in_row_major_order(tmp_path: Path):
    values = np.arange(12, dtype=np.int32).reshape(3, 4).T
    write_dat(tmp_path / "w.dat", array_payload(values))
    assert np.array_equal(read_dat(tmp_path / "w.dat"), values)


def test_header_is_laid_out_as_tract_reads_it():
    header = DatHeader(shape=(48, 64), bits=0xFFFFFFFF, item_type=0x3040, vendor=0x5452, nbytes=48 * 2 * 18)
    data = header.pack()
    assert len(data) == 128
    assert data[:4] == bytes([0x4E, 0xEF, 1, 0])
    assert struct.unpack_from("<II8I", data, 4) == (48 * 2 * 18, 2, 48, 64, 0, 0, 0, 0, 0, 0)
    assert struct.unpack_from("<IHH", data, 44) == (0xFFFFFFFF, 0x3040, 0x5452)
    assert data[52:] == bytes(76)
    assert DatHeader.unpack(data) == header
    assert header.format == "q4_0"


def test_signed_integers_of_item_type_4_are_read_too():
    assert DatHeader(shape=(2,), bits=64, item_type=4, nbytes=16).format == "i64"


def test_q4_0_blocks_decode_as_the_gguf_package_decodes_them(tmp_path: Path):
    weight = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    write_dat(tmp_path / "w.dat", q4_0_payload((6, 96), lambda: [memoryview(packed).cast("B")]))
    truth = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    back = read_dat(tmp_path / "w.dat")
    assert back.shape == (6, 96)
    assert np.array_equal(back, truth)


def test_q4_0_blocks_decode_as_the_definition_says(tmp_path: Path):
    nibbles = np.random.default_rng(2).integers(0, 16, size=(4, 2, 32), dtype=np.uint8)
    scales = np.array([[0.5, -2], [0, 1e-4], [3, 65504], [1, 1]], np.float16)
    packed = np.concatenate([scales[..., None].view(np.uint8), nibbles[..., :16] | nibbles[..., 16:] << 4], axis=-1)
    write_dat(tmp_path / "w.dat", q4_0_payload((4, 64), lambda: [packed.tobytes()]))
    truth = (nibbles.astype(np.float32) - 8) * scales[..., None].astype(np.float32)
    assert np.array_equal(read_dat(tmp_path / "w.dat"), truth.reshape(4, 64))


def test_q8_1_blocks_decode_as_the_definition_says(tmp_path: Path):
    values = np.random.default_rng(3).integers(-127, 128, size=(4, 32), dtype=np.int8)
    scales = np.array([0.5, 2, 0, 1e-3], np.float16)[:, None]
    packed = np.concatenate([scales.view(np.uint8), np.zeros((4, 2), np.uint8), values.view(np.uint8)], axis=1)
    write_dat(tmp_path / "w.dat", q8_1_payload((4, 32), lambda: [packed.tobytes()]))
    assert np.array_equal(read_dat(tmp_path / "w.dat"), values * scales.astype(np.float32))


def test_rows_of_a_block_format_may_have_more_axes():
    assert q4_0_payload((4, 3, 32), list).header.nbytes == 4 * 3 * 18


@pytest.mark.parametrize("shape", [(32,), (4, 48), (4, 3, 3)], ids=str)
def test_shapes_that_blocks_cannot_hold_are_refused(shape: tuple[int, ...]):
    with pytest.raises(FormatError, match="q4_0 needs"):
        q4_0_payload(shape, list)


def test_bf16_is_refused_because_nnef_has_none():
    with pytest.raises(FormatError, match="cast to f32 or f16"):
        dense_payload((2,), "bf16", list)


@pytest.mark.parametrize("given", [7, 9], ids=["short", "long"])
def test_chunks_that_do_not_add_up_are_refused_and_leave_nothing(tmp_path: Path, given: int):
    with pytest.raises(FormatError, match=r"'w' gave .* its header says 8"):
        write_dat(tmp_path / "w.dat", dense_payload((2,), "f32", lambda: [bytes(given)]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "payload",
    [
        dense_payload((1 << 30,), "f32", lambda: pytest.fail("values were asked for")),
        dense_payload((1 << 16, 1 << 16), "u8", lambda: pytest.fail("values were asked for")),
        q4_0_payload((1 << 18, 1 << 15), lambda: pytest.fail("values were asked for")),
    ],
    ids=["f32", "u8", "q4_0"],
)
def test_four_gib_are_refused_by_name_before_any_write(tmp_path: Path, payload):
    with pytest.raises(FormatError, match=r"'model\.huge' takes .* less than 4 GiB"):
        write_dat(tmp_path / "model.huge.dat", payload)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_payload_below_four_gib_has_a_header():
    header = dense_payload(((1 << 32) - 1,), "u8", list).header
    assert DatHeader.unpack(header.pack()) == header


def test_rank_nine_is_refused_by_name(tmp_path: Path):
    with pytest.raises(FormatError, match=r"'w' has rank 9; .* at most 8"):
        write_dat(tmp_path / "w.dat", array_payload(np.ones((1,) * 9, np.float32)))


@pytest.mark.parametrize("size", [0, 127], ids=["empty", "short"])
def test_a_header_of_the_wrong_size_is_refused(size: int):
    with pytest.raises(FormatError, match=f"128 bytes, got {size}"):
        read_header(bytes(size))


def _damaged(offset: int, value: bytes) -> bytes:
    data = bytearray(dense_payload((2, 3), "f32", list).header.pack())
    data[offset : offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_damaged(0, b"PK"), "not a .dat file"),
        (_damaged(2, b"\x02"), "version 2.0"),
        (_damaged(8, b"\x09"), "claims rank 9"),
        (_damaged(4, b"\x19"), "takes 24 bytes, got 25"),
        (_damaged(12, b"\xff\xff\xff\xff"), "takes .* bytes, got 24"),
        (_damaged(44, b"\x07"), "tensor .*: unknown item"),
        (_damaged(50, b"\x01"), "unknown item"),
    ],
    ids=["magic", "version", "rank", "size", "dims", "bits", "vendor"],
)
def test_a_damaged_header_is_refused(data: bytes, message: str):
    with pytest.raises(FormatError, match=message):
        DatHeader.unpack(data)


def test_a_file_of_another_length_than_its_header_says_is_refused(tmp_path: Path):
    path = tmp_path / "w.dat"
    write_dat(path, array_payload(np.ones(4, np.float32)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=f"{HEADER_NBYTES + 15} bytes; its header says {HEADER_NBYTES + 16}"):
        read_dat(path)
