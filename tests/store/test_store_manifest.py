import hashlib
import json

import pytest

from t2n_hf.errors import ArchiveError, FormatError, StorageError
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest, FileEntry, list_files

VALUE = {"name": "input_ids", "dtype": "i64", "shape": [1, "S"]}


def manifest_of(folder, **changes):
    known = {"archive": "model", "dtype": "f16", "weights": "q4_0", "files": list_files(folder)}
    known |= {"inputs": [VALUE], "symbols": ["S"], "source": {"id": "alice/tiny", "revision": None}}
    return ExportManifest(**(known | changes))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "export"
    (path / "model").mkdir(parents=True)
    (path / "model" / "graph.nnef").write_text("graph")
    (path / "config.json").write_text("{}")
    (path / "README.md").write_text("card")
    (path / "LICENSE").write_text("licence")
    return path


def with_files(**files):
    listed = {name.replace("|", "/"): {"sha256": "0" * 64, "size": 1} for name in files}
    value = {"schema_version": 1, "archive": "model", "dtype": "f32", "weights": "none"}
    return json.dumps(value | {"files": {"model/graph.nnef": {"sha256": "0" * 64, "size": 1}} | listed}).encode()


def test_what_is_written_is_read_back_and_has_the_same_bytes_again(folder):
    manifest = manifest_of(folder)
    manifest.write(folder)
    read = ExportManifest.read(folder)
    assert read.to_json() == manifest.to_json() == (folder / MANIFEST_NAME).read_bytes()
    assert (read.source_id, read.inputs, read.max_context) == ("alice/tiny", [VALUE], None)
    read.verify(folder)


def test_the_card_and_the_licence_are_not_listed(folder):
    entry = FileEntry(hashlib.sha256(b"{}").hexdigest(), 2)
    files = list_files(folder)
    assert files.keys() == {"model/graph.nnef", "config.json"}
    assert files["config.json"] == entry


def test_a_known_hash_is_not_computed_again(folder):
    assert list_files(folder, {"model/graph.nnef": ("a" * 64, 5)})["model/graph.nnef"] == FileEntry("a" * 64, 5)


def test_a_file_that_is_changed_missing_or_too_many_is_named(folder):
    manifest = manifest_of(folder)
    (folder / "config.json").write_text("[]")
    (folder / "model" / "graph.nnef").unlink()
    (folder / "model" / "extra.dat").write_text("x")
    with pytest.raises(ArchiveError) as refused:
        manifest.verify(folder)
    assert "config.json: its sha256" in str(refused.value)
    assert "model/graph.nnef: missing" in str(refused.value)
    assert "model/extra.dat: not listed" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "./a",
        "a\\b",
        "C:x",
        "a\nb",
        ".git/config",
        "a.",
        "README.md",
        "",
        "x" * 600,
    ],
)
def test_a_name_that_could_mean_another_place_is_refused(name):
    with pytest.raises(ArchiveError, match="refused"):
        ExportManifest.from_json(with_files(**{name: None}))


@pytest.mark.parametrize("names", [("a.json", "A.json"), ("b", "b/c"), ("b", "B/c")], ids=["case", "folder", "both"])
def test_names_that_fall_together_are_refused(names):
    with pytest.raises(ArchiveError):
        ExportManifest.from_json(with_files(**dict.fromkeys(names)))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04pickle",
        b"[]",
        b"{" * 100_000,
        b'{"schema_version": 2}',
        b'{"schema_version": 1}',
        with_files().replace(b"0" * 64, b"zz"),
        with_files().replace(b'"size": 1', b'"size": -1'),
        with_files().replace(b'"size": 1', b'"size": 1, "size": 2'),
        with_files().replace(b'"model/graph.nnef"', b'"other.nnef"'),
        with_files().replace(b'"dtype": "f32"', b'"dtype": 3'),
        with_files().replace(b'"files"', b'"symbols": {}, "files"'),
        with_files().replace(b'"files"', b'"inputs": [1], "files"'),
    ],
    ids=["pickle", "list", "deep", "newer", "empty", "hash", "size", "twice", "archive", "dtype", "symbols", "inputs"],
)
def test_what_is_no_manifest_is_refused(content):
    with pytest.raises(FormatError, match=MANIFEST_NAME):
        ExportManifest.from_json(content)


def test_a_folder_without_a_manifest_is_no_export(tmp_path):
    with pytest.raises(StorageError, match="not an export"):
        ExportManifest.read(tmp_path)
