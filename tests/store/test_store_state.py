"""Offload states as files, with the safetensors package as independent truth."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from t2n_hf.errors import FormatError, StorageError
from t2n_hf.store.state import StoredState, read_state, write_state, write_tensors


def state() -> StoredState:
    tensors = {
        "qs": torch.arange(7, dtype=torch.uint8),
        "d": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half(),
        "turned": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 2),
        "brain": torch.ones(3, dtype=torch.bfloat16),
    }
    return {
        "tag": "t2n_hf.test.v1",
        "tensors": tensors,
        "meta": {"dtype": "f32", "shape": [1, 2], "nested": {"a": None}},
    }


def test_a_state_comes_back_as_it_was(tmp_path: Path):
    write_state(tmp_path / "s", state())
    back = read_state(tmp_path / "s")
    assert back["tag"] == "t2n_hf.test.v1"
    assert back["meta"] == state()["meta"]
    assert set(back["tensors"]) == set(state()["tensors"])
    for name, expected in state()["tensors"].items():
        assert back["tensors"][name].dtype == expected.dtype
        assert torch.equal(back["tensors"][name], expected)


def test_the_library_reads_what_was_written(tmp_path: Path):
    write_state(tmp_path / "s", state())
    found = load_file(tmp_path / "s")
    assert all(torch.equal(found[name], expected) for name, expected in state()["tensors"].items())
    with safe_open(tmp_path / "s", "pt") as file:
        content = json.loads(file.metadata()["t2n_hf.offload_state"])
    assert content == {"schema_version": 1, "tag": "t2n_hf.test.v1", "meta": state()["meta"]}


def test_the_same_state_gives_the_same_bytes_in_any_order(tmp_path: Path):
    write_state(tmp_path / "a", state())
    other = state()
    other["tensors"] = dict(reversed(other["tensors"].items()))
    other["meta"] = dict(reversed(other["meta"].items()))
    write_state(tmp_path / "b", other)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_parts_may_share_memory(tmp_path: Path):
    whole = torch.arange(8.0)
    write_state(tmp_path / "s", {"tag": "a.b.v1", "tensors": {"x": whole[:6], "y": whole[2:]}, "meta": {}})
    back = read_state(tmp_path / "s")["tensors"]
    assert torch.equal(back["x"], whole[:6])
    assert torch.equal(back["y"], whole[2:])


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({"a.b": torch.ones(1)}, {}, "part name 'a.b' is no identifier"),
        ({"a": torch.ones(1, device="meta")}, {}, "expected a plain, dense tensor"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, {}, "not supported"),
        ({}, {"a": object()}, "cannot be written as JSON"),
        ({}, {"a": float("nan")}, "cannot be written as JSON"),
    ],
    ids=["name", "meta tensor", "dtype", "object", "nan"],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path, tensors: dict, meta: dict, message: str):
    with pytest.raises(FormatError, match=message):
        write_state(tmp_path / "s", {"tag": "a.b.v1", "tensors": tensors, "meta": meta})
    assert os.listdir(tmp_path) == []


def test_a_safetensors_file_without_a_state_is_refused(tmp_path: Path):
    save_file({"a": torch.ones(2)}, tmp_path / "s")
    with pytest.raises(FormatError, match="holds no offload state"):
        read_state(tmp_path / "s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"schema_version": 2, "tag": "a.b.v1", "meta": {}}', "schema 2; this t2n_hf reads 1"),
        ('{"schema_version": 1, "tag": 3, "meta": {}}', "needs a tag"),
        ('{"schema_version": 1, "tag": "a.b.v1", "meta": []}', "needs a tag"),
    ],
    ids=["json", "version", "tag", "meta"],
)
def test_a_damaged_state_is_refused(tmp_path: Path, text: str, message: str):
    write_tensors(tmp_path / "s", {}, {"t2n_hf.offload_state": text})
    with pytest.raises(FormatError, match=message):
        read_state(tmp_path / "s")


def test_a_truncated_state_is_refused(tmp_path: Path):
    write_state(tmp_path / "s", state())
    os.truncate(tmp_path / "s", os.path.getsize(tmp_path / "s") - 1)
    with pytest.raises(StorageError, match="is truncated"):
        read_state(tmp_path / "s")
