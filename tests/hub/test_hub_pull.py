import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hub_folders import make_export, write_manifest
from hub_processes import STRANGER_TOKEN, TOKEN
from hub_server import HubServer

from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tract.runner import TractRunner

BIG = 12_000_000
NAMES = {"README.md", "LICENSE", "config.json", "tokenizer.json", "model.nnef.tgz", "t2n_export.json"}


def content_of(folder):
    folder = Path(folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(server, repo, **files):
    """Commit files straight into the stand-in, past every check of a push."""
    found = server.repo(repo)
    tree = server.tree(repo) | {name.replace("|", "/"): server.store.regular(data) for name, data in files.items()}
    meta = {"parent": found["refs"]["refs/heads/main"], "title": "put", "body": "", "author": "mallory"}
    server.store.commit(found, "refs/heads/main", tree, meta)


def put_folder(server, repo, folder):
    server.store.create("model", repo, private=False)
    put(server, repo, **content_of(folder))


def assert_nothing_left(worker, repo):
    assets = worker.home / "assets" / "t2n_hf" / repo.replace("/", "--")
    assert [path for path in assets.rglob("*") if path.is_file()] == []


@pytest.mark.tract
@pytest.mark.parametrize("format", ["tgz", "tar", "dir"])
def test_a_pulled_archive_runs_when_all_that_it_came_from_is_gone(worker, repo, tmp_path, format):
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    worker.push(make_export(tmp_path / "export", format=format, numbers=weight), repo)
    shutil.rmtree(tmp_path / "export")
    pulled = Path(worker.pull(repo).result)
    x = np.array([[1, 2, 3, 4]], dtype=np.float32)
    with TractRunner(pulled / ExportManifest.read(pulled).archive) as runner:
        np.testing.assert_array_equal(runner.run({"x": x})["y"], x @ weight)


@pytest.mark.parametrize("format", ["tgz", "tar", "dir"])
def test_a_pull_gives_back_what_was_pushed_and_a_second_one_fetches_nothing(worker, server, repo, tmp_path, format):
    folder = make_export(tmp_path / "export", format=format, nbytes=BIG, seed=100 + worker.xet)
    pushed = worker.push(folder, repo)
    server.log.clear()
    pulled = worker.pull(repo).result
    assert pulled.endswith(pushed.oid)
    expected, got = content_of(folder), content_of(pulled)
    assert got.pop("README.md") == expected.pop("README.md").replace(b"<repo>", repo.encode())
    assert got == expected
    assert worker.xet == any("/xet/" in path for _, path, _ in server.log)
    server.log.clear()
    assert worker.pull(repo, pushed.oid[:40]).result == pulled
    assert sum("/resolve/" in path or "/xet/" in path for _, path, _ in server.log) <= 1


def test_a_pulled_export_can_be_pushed_again_unchanged(worker, server, repo, tmp_path):
    first = worker.push(make_export(tmp_path / "export"), repo)
    assert worker.push(worker.pull(repo).result, repo).oid == first.oid


def test_a_path_is_filled_and_an_existing_one_is_refused(worker, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo)
    target = tmp_path / "here"
    assert worker.pull(repo, path=str(target)).result == str(target)
    assert content_of(target).keys() == NAMES
    answer = worker.pull(repo, path=str(target))
    assert answer.error[0] == "OutputExistsError"


def test_a_branch_and_a_tag_can_be_asked_for(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "one", seed=1), repo)
    second = worker.push(make_export(tmp_path / "two", seed=2), repo, revision="second")
    assert worker.pull(repo, "second").result.endswith(second.oid)
    server.repo(repo)["refs"]["refs/tags/v1"] = second.oid
    assert worker.pull(repo, "v1").result.endswith(second.oid)
    assert not worker.pull(repo).result.endswith(second.oid)


def test_files_beside_the_manifest_are_never_fetched(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo)
    put(server, repo, **{"modeling_evil.py": b"import os", "picture.png": b"\x89PNG"})
    server.log.clear()
    assert content_of(worker.pull(repo).result).keys() == NAMES
    assert not any("evil" in path or "picture" in path for _, path, _ in server.log)


def test_a_private_export_is_pulled_with_the_right_token_only(worker, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo, private=True)
    assert worker.pull(repo, token=STRANGER_TOKEN).error[0] == "HubError"
    assert worker.pull(repo).result


@pytest.mark.parametrize("cut_after", [100_000, 5_000_000])
def test_a_cut_download_is_resumed(worker, server, repo, tmp_path, cut_after):
    folder = make_export(tmp_path / "export", nbytes=BIG, seed=cut_after + worker.xet)
    worker.push(folder, repo)
    server.fault("GET", "/xet/data/" if worker.xet else "/resolve/.*tgz", cut_after=cut_after)
    pulled = worker.pull(repo).result
    assert server.faults[-1]["times"] == 0
    assert content_of(pulled)["model.nnef.tgz"] == (folder / "model.nnef.tgz").read_bytes()


def test_a_spoiled_file_is_refused_and_fetched_anew_by_the_next_pull(worker, server, repo, tmp_path):
    put_folder(server, repo, make_export(tmp_path / "export", nbytes=BIG, seed=7))
    blob = server.store.blob(server.tree(repo)["model.nnef.tgz"]["sha256"])
    good = blob.read_bytes()
    blob.write_bytes(good[:5_000_000] + b"X" + good[5_000_001:])
    answer = worker.pull(repo)
    assert answer.error[0] == "ArchiveError"
    assert "model.nnef.tgz: its sha256" in answer.text
    assert_nothing_left(worker, repo)
    blob.write_bytes(good)
    assert content_of(worker.pull(repo).result)["model.nnef.tgz"] == good


def test_a_folder_that_was_spoiled_later_is_made_again(worker, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo)
    pulled = Path(worker.pull(repo).result)
    (pulled / "config.json").write_text("{}")
    (pulled / "LICENSE").unlink()
    assert content_of(worker.pull(repo).result)["config.json"] == (tmp_path / "export/config.json").read_bytes()


def test_files_of_another_size_and_missing_ones_are_refused_before_they_are_fetched(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo)
    put(server, repo, **{"config.json": b"{} "})
    del server.tree(repo)["tokenizer.json"]
    server.log.clear()
    answer = worker.pull(repo)
    assert answer.error[0] == "ArchiveError"
    assert "config.json: 3 bytes" in answer.text
    assert "tokenizer.json: missing" in answer.text
    assert not any(path.endswith(".tgz") for _, path, _ in server.log)
    assert_nothing_left(worker, repo)


def test_a_file_too_many_in_the_folder_of_the_archive_is_refused(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "export", format="dir"), repo)
    put(server, repo, **{"model|extra.dat": b"more"})
    answer = worker.pull(repo)
    assert answer.error[0] == "ArchiveError"
    assert "model/extra.dat: not listed" in answer.text


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hosts", "a/../../b", "C:\\x", "run.py", "weights.pkl"])
def test_a_hostile_manifest_is_refused_and_nothing_else_is_fetched(worker, server, repo, tmp_path, name):
    folder = make_export(tmp_path / "export")
    manifest = json.loads((folder / "t2n_export.json").read_text())
    manifest["files"][name] = manifest["files"]["config.json"]
    (folder / "t2n_export.json").write_text(json.dumps(manifest))
    put_folder(server, repo, folder)
    answer = worker.pull(repo)
    assert answer.error[0] == "ArchiveError"
    assert [path for _, path, _ in server.log if "/resolve/" in path and "t2n_export.json" not in path] == []
    assert_nothing_left(worker, repo)


def test_a_repository_without_a_manifest_is_no_export(worker, server, repo):
    server.store.create("model", repo, private=False)
    answer = worker.pull(repo)
    assert answer.error[0] == "HubError"
    assert "no export of t2n_hf" in answer.text


def hostile_tar(path, name, kind=tarfile.REGTYPE, target=""):
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        tar.addfile(info)


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("../escaped.nnef", tarfile.REGTYPE, ""),
        ("/tmp/absolute.nnef", tarfile.REGTYPE, ""),
        ("graph.nnef", tarfile.SYMTYPE, "/etc/hosts"),
        ("graph.nnef", tarfile.LNKTYPE, "../../x"),
    ],
    ids=["parent", "absolute", "symlink", "hardlink"],
)
def test_a_hostile_member_is_refused_although_its_archive_has_the_right_sha256(
    worker, server, repo, tmp_path, name, kind, target
):
    folder = make_export(tmp_path / "export")
    hostile_tar(folder / "model.nnef.tgz", name, kind, target)
    write_manifest(folder)
    put_folder(server, repo, folder)
    answer = worker.pull(repo)
    assert answer.error[0] == "ArchiveError"
    assert_nothing_left(worker, repo)


def test_an_archive_that_claims_a_terabyte_is_refused(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export")
    with tarfile.open(folder / "model.nnef.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("graph.nnef")
        info.size = 1 << 40
        tar.fileobj.write(info.tobuf(tarfile.GNU_FORMAT))
    write_manifest(folder)
    put_folder(server, repo, folder)
    assert worker.pull(repo).error[0] == "ArchiveError"
    assert_nothing_left(worker, repo)


def test_the_token_does_not_go_to_the_host_that_stores_the_files(cdn, tmp_path):
    folder = make_export(tmp_path / "export")
    cdn.worker.push(folder, "alice/cdn", private=True)
    cdn.server.seen_auth.clear()
    assert cdn.worker.pull("alice/cdn").result
    assert {sent for path, sent in cdn.server.seen_auth if path.startswith("/cdn/")} == {False}
    assert {sent for path, sent in cdn.server.seen_auth if path.startswith("/api/models")} == {True}


def test_what_was_pulled_once_is_found_without_the_hub(workers, tmp_path):
    with HubServer(tmp_path / "hub", {TOKEN: ("alice", "write")}) as server:
        worker = workers(xet=False, url=server.url)
        worker.push(make_export(tmp_path / "export"), "alice/offline")
        pulled = worker.pull("alice/offline").result
    assert worker.pull("alice/offline").result == pulled


def test_large_files_are_on_the_disk_once(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "export", nbytes=BIG, seed=77), repo)
    pulled = Path(worker.pull(repo).result)
    assert os.stat(pulled / "model.nnef.tgz").st_nlink == 2
    assert os.stat(pulled / "config.json").st_nlink == 1
    digest = hashlib.sha256((pulled / "model.nnef.tgz").read_bytes()).hexdigest()
    assert server.tree(repo)["model.nnef.tgz"]["sha256"] == digest


def test_an_export_pushed_with_xet_is_pulled_without_it(lfs_worker, xet_worker, repo, tmp_path):
    folder = make_export(tmp_path / "export", format="tar", nbytes=3_000_000, seed=5)
    assert xet_worker.push(folder, repo).oid
    pulled = lfs_worker.pull(repo).result
    assert content_of(pulled)["model.nnef.tar"] == (folder / "model.nnef.tar").read_bytes()
