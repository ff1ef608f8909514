import os
import threading
import time

import pytest
from hub_folders import make_export, write_archive, write_manifest
from hub_processes import STRANGER_TOKEN, TOKEN

BIG = 12_000_000


def uploads(server):
    return [path for method, path, _ in server.log if (method, path[:5]) == ("PUT", "/lfs/") or "/xorbs/" in path]


def test_a_push_is_one_commit_of_the_listed_files_and_the_same_export_makes_no_second(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export")
    (folder / ".env").write_text("SECRET=1")
    (folder / "notes.log").write_text("private")
    first = worker.push(folder, repo)
    assert first.result == f"{server.url}/{repo}/commit/{first.oid}"
    expected = {"README.md", "LICENSE", "config.json", "tokenizer.json", "model.nnef.tgz", "t2n_export.json"}
    assert server.tree(repo).keys() == {*expected, ".gitattributes"}
    again = worker.push(folder, repo)
    assert (again.oid, len(server.commits(repo))) == (first.oid, 1)
    assert first.warnings == again.warnings == []


def test_the_card_names_the_repository(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "export"), repo)
    card = server.store.blob(server.tree(repo)["README.md"]["sha256"]).read_text()
    assert f'from_pretrained("{repo}")' in card
    assert "<repo>" not in card


def test_an_edited_card_is_a_commit_of_the_card_alone(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export")
    worker.push(folder, repo)
    before = server.tree(repo)
    with open(folder / "README.md", "a") as card:
        card.write("\nOne more word.\n")
    worker.push(folder, repo)
    after = server.tree(repo)
    assert [name for name in after if after[name] != before.get(name)] == ["README.md"]
    assert len(server.commits(repo)) == 2


def test_files_of_an_earlier_export_go_and_files_of_others_stay(worker, server, repo, tmp_path):
    worker.push(make_export(tmp_path / "dir", format="dir"), repo)
    assert "model/graph.nnef" in server.tree(repo)
    found = server.repo(repo)
    head = found["commits"][found["refs"]["refs/heads/main"]]
    head["tree"]["picture.png"] = server.store.regular(b"\x89PNG")
    worker.push(make_export(tmp_path / "tgz"), repo)
    tree = server.tree(repo)
    assert [name for name in tree if name.startswith("model")] == ["model.nnef.tgz"]
    assert "picture.png" in tree
    assert len(server.commits(repo)) == 2


def test_private_creates_a_private_repository(worker, server, repo, tmp_path):
    answer = worker.push(make_export(tmp_path / "export"), repo, private=True)
    assert answer.oid
    assert server.repo(repo)["private"]
    assert worker.push(tmp_path / "export", repo, private=True).oid == answer.oid


@pytest.mark.parametrize(("private", "is_now"), [(True, "public"), (False, "private")])
def test_private_is_refused_before_the_first_byte_when_the_repository_is_the_other(
    worker, server, repo, tmp_path, private, is_now
):
    server.store.create("model", repo, private=not private)
    answer = worker.push(make_export(tmp_path / "export"), repo, private=private)
    assert answer.error[0] == "HubError"
    assert f"exists and is {is_now}" in answer.text
    assert {method for method, _, _ in server.log} == {"GET"}


def test_a_branch_is_made_when_missing_and_main_is_left_alone(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export")
    answer = worker.push(folder, repo, revision="f16/v2", commit_message="Second form")
    assert server.commits(repo, "f16/v2") == ["Second form"]
    assert server.commits(repo) == []
    assert worker.push(folder, repo, revision="f16/v2").oid == answer.oid


def test_a_pull_request_leaves_main_alone(worker, server, repo, tmp_path):
    server.store.create("model", repo, private=False)
    answer = worker.push(make_export(tmp_path / "export"), repo, create_pr=True, token=STRANGER_TOKEN)
    assert answer.pr_url == f"{server.url}/{repo}/discussions/1"
    assert server.commits(repo) == []
    assert "model.nnef.tgz" in server.tree(repo, "refs/pr/1")


def test_files_that_the_repository_ignores_are_told(worker, server, repo, tmp_path):
    server.store.create("model", repo, private=False)
    server.tree(repo)[".gitignore"] = server.store.regular(b"*.json")
    answer = worker.push(make_export(tmp_path / "export"), repo)
    assert answer.error[0] == "HubError"
    assert "lacks t2n_export.json" in answer.text
    assert ".gitignore" in answer.text


def test_a_card_that_the_hub_would_refuse_is_told_before_anything_is_uploaded(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export")
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n")
    answer = worker.push(folder, repo)
    assert answer.error[0] == "HubError"
    assert "README.md" in answer.text
    assert uploads(server) == server.commits(repo) == []


@pytest.mark.parametrize(
    ("fault", "status"), [({"cut_after": 3_000_000}, None), ({"status": 503}, 503)], ids=["cut", "busy"]
)
def test_a_spoiled_upload_is_finished_inside_the_call_with_one_commit(worker, server, repo, tmp_path, fault, status):
    path = "/xorbs/" if worker.xet else "/lfs/"
    server.fault("POST" if worker.xet else "PUT", path, **fault)
    seed = 10 + 2 * worker.xet + (status is None)
    answer = worker.push(make_export(tmp_path / "export", nbytes=BIG, seed=seed), repo)
    assert answer.oid
    assert (499 if status is None else status) in [code for _, _, code in server.log]
    assert len(server.commits(repo)) == 1


@pytest.mark.parametrize("fault", [{"cut_reply": True}, {"status": 503}], ids=["answer lost", "busy"])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(worker, server, repo, tmp_path, fault):
    server.fault("POST", r"/commit/main", **fault)
    answer = worker.push(make_export(tmp_path / "export"), repo)
    assert answer.oid == server.repo(repo)["refs"]["refs/heads/main"]
    assert len(server.commits(repo)) == 1


def test_a_commit_made_meanwhile_by_another_is_told_and_not_overwritten(worker, server, repo, tmp_path):
    server.store.create("model", repo, private=False)
    found = server.repo(repo)
    others = {}

    class Racing(list):
        """The log: another commit lands while this push has looked at the head, and has not committed."""

        def append(self, entry):
            super().append(entry)
            if "/preupload/" in entry[1] and not others:
                tree = server.tree(repo) | {"other.txt": server.store.regular(b"other")}
                meta = {"parent": found["refs"]["refs/heads/main"], "title": "other", "body": "", "author": "bob"}
                others["sha"] = server.store.commit(found, "refs/heads/main", tree, meta)

    server.log = Racing()
    try:
        answer = worker.push(make_export(tmp_path / "export"), repo)
    finally:
        server.log = []
    assert answer.error[0] == "HubError"
    assert "somebody else committed" in answer.text
    assert server.commits(repo) == ["other"]


def test_a_push_that_was_killed_is_finished_by_the_next_one(worker, workers, server, repo, tmp_path):
    folder = make_export(tmp_path / "export", format="dir", nbytes=BIG, seed=30 + worker.xet)
    write_archive(folder / "second.nnef.tgz", nbytes=BIG, seed=40 + worker.xet)
    write_manifest(folder, "model")
    killed = workers(xet=worker.xet)
    stuck, finished = threading.Event(), []

    class Stopping(list):
        """The log: the process is killed after its first upload, before it can commit."""

        def append(self, entry):
            super().append(entry)
            is_upload = (entry[0], entry[1][:5]) == ("PUT", "/lfs/") or (entry[0] == "POST" and "/xorbs/" in entry[1])
            if is_upload and not stuck.is_set():
                finished.append(entry)
                stuck.set()
                killed.process.kill()

    server.log, others = Stopping(), server.clients
    killed.start("push", folder, repo, token=TOKEN)
    assert stuck.wait(120)
    killed.process.wait()
    end = time.monotonic() + 120
    while server.clients - others:  # what it had begun to send is still looked at
        assert time.monotonic() < end
        time.sleep(0.01)
    server.log = []
    assert server.commits(repo) == []
    assert worker.push(folder, repo).oid
    assert len(server.commits(repo)) == 1
    assert "second.nnef.tgz" in server.tree(repo)
    if not worker.xet:  # the stand-in knows no Xet deduplication; with LFS a finished file is not sent again
        ((_, path, status),) = finished
        assert status == 200
        assert path not in uploads(server)
        assert len(uploads(server)) <= 1


def test_large_files_go_in_parts_when_the_server_asks_for_it(cdn, tmp_path):
    folder = make_export(tmp_path / "export", nbytes=BIG)
    assert cdn.worker.push(folder, "alice/parts").oid
    assert len([path for path in uploads(cdn.server) if "/part/" in path]) == 3
    with open(os.path.join(cdn.worker.pull("alice/parts").result, "model.nnef.tgz"), "rb") as got:
        assert got.read() == (folder / "model.nnef.tgz").read_bytes()


@pytest.mark.slow
def test_a_large_export_makes_the_round_trip(worker, server, repo, tmp_path):
    folder = make_export(tmp_path / "export", nbytes=400_000_000)
    first = worker.push(folder, repo)
    assert worker.push(folder, repo).oid == first.oid
    assert os.path.getsize(os.path.join(worker.pull(repo).result, "model.nnef.tgz")) > 400_000_000
    assert len(server.commits(repo)) == 1
