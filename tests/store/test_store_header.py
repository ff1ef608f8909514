"""Safetensors headers as hostile input."""

import json
from pathlib import Path

import pytest

from t2n_hf.errors import FormatError, StorageError
from t2n_hf.store.header import load_json_object, parse_header


def entry(begin: int, end: int, dtype: str = "U8", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def parse(header: object, nbytes: int = 8, size: int | None = None) -> object:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_file(len(text).to_bytes(8, "little") + text + bytes(nbytes), size)


def parse_file(content: bytes, size: int | None = None) -> object:
    def read(nbytes: int, offset: int) -> bytes:
        return content[offset : offset + nbytes]

    return parse_header(Path("x.safetensors"), len(content) if size is None else size, read)


def test_a_good_header_gives_metadata_and_places():
    metadata, entries = parse({"__metadata__": {"a": "b"}, "w": entry(0, 8, "F16", [2, 2])})
    assert metadata == {"a": "b"}
    assert (entries["w"].dtype, entries["w"].shape) == ("F16", (2, 2))
    assert entries["w"].end - entries["w"].begin == 8


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": entry(0, 4), "v": entry(2, 8)}, "tensor 'v' overlaps tensor 'w'"),
        ({"w": entry(0, 8), "v": entry(0, 8)}, "overlaps"),
        ({"w": entry(0, 4), "v": entry(5, 8)}, "before tensor 'v', belong to no tensor"),
        ({"w": entry(0, 7)}, "1 bytes after the last tensor"),
        ({"w": entry(0, 8, "F32", [1])}, "'w' of shape .1. and dtype F32 takes 4 bytes"),
        ({"w": entry(0, 8, "F99")}, "'w' has unknown dtype 'F99'"),
        ({"w": entry(0, 8, "U8", [-8])}, "'w' has a shape or offsets that are no counts"),
        ({"w": entry(0, 8, "U8", [1 << 70])}, "no counts"),
        ({"w": entry(0, 8, "U8", [2.0, 4])}, "no counts"),
        ({"w": entry(0, 8, "U8", [True, 8])}, "no counts"),
        ({"w": entry(8, 0, "U8", [])}, "'w' of shape"),
        ({"w": entry(0, 8, "F4", [3])}, "takes 1.5 bytes"),
        ({"w": {"dtype": "U8", "shape": [8]}}, "'w' lacks"),
        ({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}}, "'w' lacks"),
        ({"w": {"dtype": ["U8"], "shape": [8], "data_offsets": [0, 8]}}, "unknown dtype"),
        ({"w": []}, "'w' lacks"),
        ({"__metadata__": {"a": 1}, "w": entry(0, 8)}, "__metadata__ must map texts to texts"),
        ([], "not an object"),
        (b"{", "not valid JSON"),
        (b'{"w": 1, "w": 2}', "'w' is there twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_lies_is_refused(header: object, message: str):
    with pytest.raises(FormatError, match=message):
        parse(header)


def test_a_tensor_beyond_the_end_is_truncation_and_named():
    with pytest.raises(StorageError, match=r"x\.safetensors is truncated: tensor 'w' ends at byte"):
        parse({"w": entry(0, 9)})


@pytest.mark.parametrize(
    "content", [b"", b"\x20\0\0", (100).to_bytes(8, "little") + b"{}"], ids=["empty", "short", "header"]
)
def test_a_file_shorter_than_its_header_is_truncation(content: bytes):
    with pytest.raises(StorageError, match="do not hold its header"):
        parse_file(content)


def test_a_huge_header_is_refused_unread():
    with pytest.raises(FormatError, match="its header claims"):
        parse_header(Path("x"), 1 << 50, lambda nbytes, offset: (1 << 40).to_bytes(8, "little")[:nbytes])


def test_an_empty_file_of_no_tensors_is_fine():
    assert parse({}, nbytes=0) == ({}, {})


@pytest.mark.parametrize("content", [b"null", b"3", b"nan", b'"a"', b""], ids=repr)
def test_json_that_is_no_object_is_refused_by_name(content: bytes):
    with pytest.raises(FormatError, match="the thing"):
        load_json_object(content, "the thing")
