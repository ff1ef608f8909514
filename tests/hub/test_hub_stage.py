import os

import pytest
from hub_folders import make_export, write_manifest

from t2n_hf.errors import ArchiveError, StorageError
from t2n_hf.hub.stage import stage


@pytest.fixture
def folder(tmp_path):
    return make_export(tmp_path / "export")


def test_only_listed_files_the_card_and_the_licence_are_staged(folder):
    for name in (".env", "notes.log", "weights.dat", ".git", "README.md.orig"):
        (folder / name).write_text("x")
    (folder / "NOTICE.txt").write_text("notice")
    staged = stage(folder, "alice/tiny")
    expected = {
        "README.md",
        "LICENSE",
        "NOTICE.txt",
        "config.json",
        "tokenizer.json",
        "model.nnef.tgz",
        "t2n_export.json",
    }
    assert staged.files.keys() == expected
    assert b"alice/tiny" in staged.files["README.md"]


def test_a_missing_card_is_made(folder):
    (folder / "README.md").unlink()
    assert b"library_name: tract" in stage(folder, "alice/tiny").files["README.md"]


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(StorageError, match="not an export"):
        stage(tmp_path, "alice/tiny")


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "README.md", "t2n_export.json"])
def test_a_link_is_refused_because_it_could_publish_any_file(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / name)
    with pytest.raises(ArchiveError, match="is a link"):
        stage(folder, "alice/tiny")


def test_a_link_to_a_folder_is_refused_too(tmp_path):
    folder = make_export(tmp_path / "export", format="dir")
    (folder / "model").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "model")
    with pytest.raises(ArchiveError, match="is a link"):
        stage(folder, "alice/tiny")


def test_a_changed_file_is_refused(folder):
    (folder / "config.json").write_text("{}")
    with pytest.raises(ArchiveError, match=r"config\.json"):
        stage(folder, "alice/tiny")


def test_a_missing_file_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArchiveError, match=r"lacks tokenizer\.json"):
        stage(folder, "alice/tiny")


@pytest.mark.parametrize("name", ["modeling_tiny.py", "weights.pt", "a.PKL"])
def test_code_and_pickles_are_refused(folder, name):
    (folder / name).write_text("x")
    write_manifest(folder)
    with pytest.raises(ArchiveError, match="never code or pickles"):
        stage(folder, "alice/tiny")


def test_a_fifo_is_refused_and_not_read(folder):
    (folder / "LICENSE").unlink()
    os.mkfifo(folder / "LICENSE")
    with pytest.raises(ArchiveError, match="not a plain file"):
        stage(folder, "alice/tiny")


def test_a_card_that_is_no_text_is_refused(folder):
    (folder / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ArchiveError, match="not UTF-8"):
        stage(folder, "alice/tiny")
