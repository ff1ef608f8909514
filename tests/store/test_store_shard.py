"""Files written tensor by tensor are those of the safetensors library."""

import json
import random

import pytest
import safetensors.torch
import torch

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import FormatError
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.memory import bytes_of
from t2n_hf.store.shard import ShardFile, ShardLayout, TensorSpec

TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def tensors():
    generator = torch.Generator().manual_seed(3)
    found = {
        f"layers.{i}.{name}": (torch.rand(3, i + 2, generator=generator) * 100).to(getattr(torch, name))
        for i, name in enumerate(TYPES)
    }
    return {
        **found,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(2, 0),
        'é "quoted" \\ name': torch.ones(5, dtype=torch.float16),
        "A": torch.ones(1),
        "a": torch.ones(1),
        "B": torch.ones(1),
        "two\nlines": torch.ones(1),
    }


def layout_of(values, metadata=None):
    specs = {name: TensorSpec(dtype_of(t.dtype).name, tuple(t.shape)) for name, t in values.items()}
    return ShardLayout(specs, metadata or {})


def write(path, values, metadata=None, seed=0):
    names = list(values)
    random.Random(seed).shuffle(names)
    with ShardFile(path, layout_of(values, metadata)) as file:
        for name in names:
            view = bytes_of(values[name])
            for start in range(0, len(view), 7):
                file.append(name, view[start : start + 7])
        return {name: file.checksum(name) for name in names}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["bare", "metadata"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_bytes_are_those_of_the_safetensors_library(metadata, seed, tmp_path):
    write(tmp_path / "ours", tensors(), metadata, seed)
    safetensors.torch.save_file(tensors(), tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_library_and_our_reader_read_it_back(tmp_path):
    write(tmp_path / "model.safetensors", tensors(), {"format": "pt"})
    theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
    ours = CheckpointIndex.open(tmp_path)
    assert set(theirs) == set(ours) == set(tensors())
    for name, value in tensors().items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(ours[name].read(), value)


def test_a_file_without_tensors_is_that_of_the_library(tmp_path):
    write(tmp_path / "ours", {})
    safetensors.torch.save_file({}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_checksum_of_what_is_in_the_file_is_that_of_what_was_appended(tmp_path):
    values = tensors()
    appended = write(tmp_path / "f", values)
    with ShardFile(tmp_path / "f", layout_of(values)) as again:
        assert {name: again.read_checksum(name) for name in values} == appended
    offset = layout_of(values).offsets["scalar"]
    with open(tmp_path / "f", "r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    with ShardFile(tmp_path / "f", layout_of(values)) as again:
        assert [name for name in values if again.read_checksum(name) != appended[name]] == ["scalar"]


def test_opening_an_older_file_keeps_its_tensors_and_mends_its_size_and_header(tmp_path):
    values = tensors()
    write(tmp_path / "f", values)
    complete = (tmp_path / "f").read_bytes()
    for damaged in (complete + b"more", b"x" * 20 + complete[20:]):
        (tmp_path / "f").write_bytes(damaged)
        ShardFile(tmp_path / "f", layout_of(values)).close()
        assert (tmp_path / "f").read_bytes() == complete


def test_more_or_fewer_bytes_than_the_shape_says_are_refused(tmp_path):
    with ShardFile(tmp_path / "f", ShardLayout({"w": TensorSpec("f16", (2, 2))}, {})) as file:
        file.append("w", memoryview(b"1234567"))
        with pytest.raises(FormatError, match="w: 7 of 8 bytes"):
            file.checksum("w")
        with pytest.raises(FormatError, match="more bytes"):
            file.append("w", memoryview(b"89"))
        file.restart(["w"])
        file.append("w", memoryview(b"abcdefgh"))
        file.checksum("w")
    assert (tmp_path / "f").read_bytes().endswith(b"abcdefgh")


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("old")
    (tmp_path / "f").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        ShardFile(tmp_path / "f", ShardLayout({}, {}))
    assert (tmp_path / "precious").read_text() == "old"


def test_the_header_is_json_without_escapes(tmp_path):
    header = layout_of(tensors(), {"format": "pt"}).header
    assert "é".encode() in header
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
