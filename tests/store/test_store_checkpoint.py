"""Byte ranges of safetensors files, with the safetensors package as independent truth."""

import copy
import gc
import json
import os
import pickle  # noqa: TID251 - it must be refused
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from t2n_hf.errors import CheckpointNotFoundError, FormatError, StorageError
from t2n_hf.store.checkpoint import CheckpointFile, CheckpointIndex

TENSORS = {
    "f32": torch.randn(5, 7),
    "f16": torch.randn(3, 2, 2).half(),
    "bf16": torch.randn(9).bfloat16(),
    "f64": torch.randn(2, 2).double(),
    "i64": torch.arange(6).view(2, 3),
    "i32": torch.arange(3, dtype=torch.int32),
    "i16": torch.arange(3, dtype=torch.int16),
    "i8": torch.arange(3, dtype=torch.int8),
    "u8": torch.arange(7, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def shards(folder: Path, **parts: dict[str, torch.Tensor]) -> Path:
    weight_map = {}
    for name, tensors in parts.items():
        save_file(tensors, folder / f"{name}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_every_tensor_is_read_as_the_library_reads_it(folder: Path):
    index = CheckpointIndex.open(folder)
    truth = load_file(folder / "model.safetensors")
    assert set(index) == set(truth)
    for name, expected in truth.items():
        found = index[name].read()
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert index[name].shape == tuple(expected.shape)
        assert index[name].nbytes == expected.nbytes
        assert found.data_ptr() % 64 == 0
    assert index["bf16"].dtype == "bf16"
    assert index.files[0].metadata == {"format": "pt"}


def test_a_read_is_fresh_memory_and_never_writes_to_the_file(folder: Path):
    before = (folder / "model.safetensors").read_bytes()
    part = CheckpointIndex.open(folder)["f32"]
    part.read().zero_()
    assert torch.equal(part.read(), TENSORS["f32"])
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_read_can_fill_memory_that_is_given(folder: Path):
    index = CheckpointIndex.open(folder)
    out = torch.empty(35 * 4, dtype=torch.uint8)
    found = index["f32"].read(out)
    assert torch.equal(found, TENSORS["f32"])
    assert found.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    same = torch.empty(5, 7)
    index["f32"].read(same)
    assert torch.equal(same, TENSORS["f32"])


@pytest.mark.parametrize(
    "out", [torch.empty(3), torch.empty(7, 5).T, torch.empty(5, 7, device="meta")], ids=["size", "order", "device"]
)
def test_memory_that_does_not_fit_is_refused(folder: Path, out: torch.Tensor):
    with pytest.raises(ValueError, match="must be contiguous"):
        CheckpointIndex.open(folder)["f32"].read(out)


@pytest.mark.parametrize("nbytes", [1, 13, 140, 1 << 20])
def test_chunks_are_the_bytes_in_order(folder: Path, nbytes: int):
    part = CheckpointIndex.open(folder)["f32"]
    chunks = [bytes(chunk) for chunk in part.chunks(nbytes)]
    assert b"".join(chunks) == TENSORS["f32"].numpy().tobytes()
    assert all(len(chunk) == nbytes for chunk in chunks[:-1])
    assert list(CheckpointIndex.open(folder)["empty"].chunks(nbytes)) == []


def test_rows_are_ranges_too(folder: Path):
    part = CheckpointIndex.open(folder)["f32"]
    assert torch.equal(part.rows(1, 4).read(), TENSORS["f32"][1:4])
    assert part.rows(2, 2).read().shape == (0, 7)
    assert part.rows(1, 4).rows(1, 2).read().tolist() == TENSORS["f32"][2:3].tolist()
    with pytest.raises(IndexError, match="rows 1 to 6 of tensor 'f32'"):
        part.rows(1, 6)


def test_large_reads_are_cut(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("t2n_hf.store.checkpoint._READ_NBYTES", 10)
    assert torch.equal(CheckpointIndex.open(folder)["f32"].read(), TENSORS["f32"])


@pytest.mark.parametrize("how", ["willneed", "dontneed"])
def test_advice_changes_nothing(folder: Path, how):
    part = CheckpointIndex.open(folder)["f32"]
    part.advise(how)
    assert torch.equal(part.read(), TENSORS["f32"])


def test_a_file_that_takes_the_name_does_not_change_what_is_read(folder: Path):
    part = CheckpointIndex.open(folder)["f32"]
    save_file({"other": torch.zeros(500)}, folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")
    assert torch.equal(part.read(), TENSORS["f32"])
    part.verify()


def test_a_file_that_is_written_to_is_noticed(folder: Path):
    path = folder / "model.safetensors"
    part = CheckpointIndex.open(folder)["f32"]
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match=r"model\.safetensors, tensor 'f32', changed since it was opened"):
        part.read()
    with pytest.raises(StorageError, match="changed since"):
        list(part.chunks())
    with pytest.raises(StorageError, match="changed since"):
        part.verify()


@pytest.mark.parametrize("same_time", [True, False])
def test_a_file_that_is_truncated_later_is_noticed_and_read_again_when_it_is_back(folder: Path, same_time):
    path = folder / "model.safetensors"
    content, times = path.read_bytes(), path.stat()
    part = CheckpointIndex.open(folder)["f32"]
    os.truncate(path, 100)
    with pytest.raises(StorageError, match=r"model\.safetensors, tensor 'f32'"):
        part.read()
    path.write_bytes(content)
    if same_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert torch.equal(part.read(), TENSORS["f32"])
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match="changed since"):
        part.read()


def test_another_file_of_the_same_size_is_not_taken_for_a_restored_one(folder: Path):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    part = CheckpointIndex.open(folder)["f32"]
    os.truncate(path, 100)
    with pytest.raises(StorageError):
        part.read()
    path.write_bytes(content.replace(b'"f32"', b'"f33"'))
    with pytest.raises(StorageError, match="changed since"):
        part.read()


def test_a_closed_file_is_not_read(folder: Path):
    index = CheckpointIndex.open(folder)
    part = index["f32"]
    index.close()
    index.close()
    with pytest.raises(StorageError, match="was closed"):
        part.read()


def descriptors_of(folder: Path) -> int:
    """How many files in `folder` this process has open; others come and go with what other tests left."""
    descriptors = Path("/proc/self/fd")
    return sum(os.path.dirname(os.path.realpath(link)) == str(folder) for link in descriptors.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_descriptors_end_with_their_files(folder: Path):
    gc.collect()
    before = descriptors_of(folder)
    index = CheckpointIndex.open(folder)
    assert descriptors_of(folder) > before
    part = index["f32"]
    del index
    gc.collect()
    assert torch.equal(part.read(), TENSORS["f32"])
    del part
    gc.collect()
    assert descriptors_of(folder) == before


def test_copies_share_the_file_and_pickles_are_refused(folder: Path):
    part = CheckpointIndex.open(folder)["f32"]
    assert copy.deepcopy(part) == part
    assert copy.deepcopy(part).file is part.file
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(part)


def test_shards_are_one_mapping(tmp_path: Path):
    index = CheckpointIndex.open(shards(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.zeros(3)}))
    assert set(index) == {"a", "b"}
    assert len(index) == 2
    assert torch.equal(index["b"].read(), torch.zeros(3))
    assert index["a"].file.path == tmp_path / "one.safetensors"
    assert set(CheckpointIndex.open([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])) == {"a", "b"}


def test_links_are_followed_as_the_hub_cache_needs(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    assert torch.equal(CheckpointIndex.open(tmp_path / "snapshot")["a"].read(), torch.ones(2))


def test_one_name_in_two_shards_is_refused(tmp_path: Path):
    shards(tmp_path, one={"a": torch.ones(2), "b": torch.ones(1)}, two={"a": torch.zeros(2)})
    with pytest.raises(FormatError, match=r"'a' is in .*one\.safetensors and in .*two\.safetensors"):
        CheckpointIndex.open(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor_of_it(tmp_path: Path):
    shards(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.zeros(3)})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(StorageError, match=r"two\.safetensors is missing; .* tensor 'b'"):
        CheckpointIndex.open(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path):
    shards(tmp_path, one={"a": torch.ones(2)})
    weight_map = {"a": "one.safetensors", "lost": "one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match="does not hold tensor 'lost'"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", "a/b", "..", "", 3, "a\\b"], ids=repr)
def test_an_index_does_not_reach_outside_its_folder(tmp_path: Path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FormatError, match="no plain file name"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"a": 1, "a": 2}'], ids=repr
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"index\.json"):
        CheckpointIndex.open(tmp_path)


def test_a_truncated_shard_names_file_and_tensor(folder: Path):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StorageError, match=r"model\.safetensors is truncated: tensor '.*' ends at byte"):
        CheckpointIndex.open(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_pickled_checkpoint_is_refused_with_the_next_step(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointNotFoundError, match=rf"{name}.* convert it to safetensors"):
        CheckpointIndex.open(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match=r"neither model\.safetensors nor"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_path_that_does_not_exist_says_so(tmp_path: Path, name: str):
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        CheckpointIndex.open(tmp_path / name)


def test_one_set_of_weights_of_another_name_is_found_and_several_are_not_guessed(tmp_path: Path):
    save_file({"a": torch.ones(2)}, tmp_path / "adapter.safetensors")
    assert set(CheckpointIndex.open(tmp_path)) == {"a"}
    save_file({"b": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"several sets of weights \(adapter.safetensors, other"):
        CheckpointIndex.open(tmp_path)


def test_a_dtype_that_is_not_supported_is_refused_when_it_is_asked_for(tmp_path: Path):
    tensors = {"a": torch.ones(2), "b": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    file = CheckpointFile(tmp_path / "model.safetensors")
    assert torch.equal(file.byte_range("a").read(), tensors["a"])
    with pytest.raises(FormatError, match="tensor 'b' has dtype F8_E4M3, which is not supported"):
        file.byte_range("b")


def test_an_unknown_name_is_a_key_error(folder: Path):
    with pytest.raises(KeyError):
        CheckpointIndex.open(folder)["nothing"]


def test_mapped_pages_hold_the_values_and_are_private(folder: Path):
    before = (folder / "model.safetensors").read_bytes()
    index = CheckpointIndex.open(folder)
    for name, expected in TENSORS.items():
        found = index[name].mapped()
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    index["f32"].mapped().zero_()
    assert torch.equal(index["f32"].mapped(), TENSORS["f32"])
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_folder_or_a_pipe_in_place_of_weights_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"model\.safetensors is no file"):
        CheckpointIndex.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(StorageError, match=r"pipe\.safetensors is no file"):
        CheckpointFile(tmp_path / "pipe.safetensors")
