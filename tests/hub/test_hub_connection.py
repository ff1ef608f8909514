from pathlib import Path

import pytest
from hub_folders import make_export
from hub_processes import READ_TOKEN, STRANGER_TOKEN, TOKEN

from t2n_hf.errors import ConfigError
from t2n_hf.hub.connection import Connection, check_repo_id

WRONG_TOKEN = "hf_" + "w" * 30


@pytest.fixture
def public(server, repo):
    server.store.create("model", repo, private=False)
    return repo


@pytest.fixture
def hidden(server, repo):
    server.store.create("model", repo, private=True)
    return repo


@pytest.mark.parametrize(
    ("token", "hint"),
    [(WRONG_TOKEN, "wrong or expired"), (READ_TOKEN, "needs write access"), (STRANGER_TOKEN, "needs write access")],
    ids=["unknown token", "read token", "of another user"],
)
def test_a_token_that_does_not_suffice_is_told_with_what_to_do(worker, server, public, tmp_path, token, hint):
    answer = worker.push(make_export(tmp_path / "export"), public, token=token)
    assert answer.error[0] == "HubError"
    assert hint in answer.text
    assert token not in answer.text + answer.trace
    assert server.commits(public) == []


def test_a_read_token_cannot_create(worker, repo, tmp_path):
    answer = worker.push(make_export(tmp_path / "export"), repo, token=READ_TOKEN)
    assert answer.error[0] == "HubError"
    assert "403" in answer.text or "404" in answer.text
    assert READ_TOKEN not in answer.text + answer.trace


def test_a_missing_repository_and_a_hidden_one_read_alike(worker, hidden):
    missing, other = worker.pull("alice/there-is-none"), worker.pull(hidden, token=STRANGER_TOKEN)
    for answer in (missing, other):
        assert answer.error[0] == "HubError"
        assert "404" in answer.text
        assert "private repository" in answer.text


def test_a_missing_branch_is_told(worker, public):
    answer = worker.pull(public, revision="nowhere")
    assert answer.error[0] == "HubError"
    assert "no such branch, tag or commit" in answer.text


def test_a_token_that_an_answer_repeats_is_blotted_out(worker, server, public, tmp_path):
    server.fault(
        "GET", f"/api/models/{public}", status=400, headers={"X-Error-Message": f"bad header {TOKEN}"}, times=9
    )
    answer = worker.push(make_export(tmp_path / "export"), public)
    assert answer.error[0] == "HubError"
    assert "<token>" in answer.text
    assert TOKEN not in answer.text + answer.trace


@pytest.mark.parametrize("bad", ["hf_line\nbreak", "hf_a b", "", "hf_ü"])
def test_what_cannot_be_a_token_is_refused_without_showing_it(bad):
    with pytest.raises(ConfigError, match="token") as refused:
        Connection.open(bad, required=True)
    assert not bad or bad not in str(refused.value)


def test_the_token_is_in_no_repr():
    assert TOKEN not in repr(Connection.open(TOKEN, required=True))


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "/home/alice/export", "a/..", "alice/with space", "../up", ""])
def test_what_is_no_repository_id_is_refused(name):
    with pytest.raises(ConfigError, match="owner/name"):
        check_repo_id(name)


def test_the_token_of_the_environment_is_used_and_written_nowhere(cdn, tmp_path):
    folder = make_export(tmp_path / "export")
    assert cdn.worker.push(folder, "alice/environment", token=None).oid
    assert cdn.worker.pull("alice/environment", token=None).result
    files = [path for place in (cdn.worker.home, folder, cdn.server.store.root) for path in place.rglob("*")]
    assert [path for path in files if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    command_line = Path(f"/proc/{cdn.worker.process.pid}/cmdline")
    assert not command_line.exists() or TOKEN.encode() not in command_line.read_bytes()


def test_without_a_token_a_push_says_how_to_get_one(worker, repo, tmp_path):
    answer = worker.push(make_export(tmp_path / "export"), repo, token=None)
    assert answer.error[0] == "ConfigError"
    assert "hf auth login" in answer.text


@pytest.mark.parametrize("options", [{"revision": "a", "create_pr": True}, {"revision": "0" * 40}, {"revision": ""}])
def test_a_revision_that_no_push_can_go_to_is_refused(worker, server, repo, tmp_path, options):
    answer = worker.push(make_export(tmp_path / "export"), repo, **options)
    assert answer.error[0] == "ConfigError"
    assert server.log == []


def test_plain_http_to_another_machine_is_warned_of_when_the_connection_opens():
    with pytest.warns(UserWarning, match=r"plain HTTP to hub\.invalid: the token and the files") as warned:
        Connection.open(TOKEN, required=True, endpoint="http://user:password@hub.invalid:1")
    assert "password" not in str(warned[0].message)


@pytest.mark.parametrize("url", ["https://hub.invalid", "http://127.0.0.1:8000", "http://[::1]:1", "http://localhost"])
def test_other_addresses_are_not_warned_of(url):
    assert Connection.open(TOKEN, required=True, endpoint=url).endpoint == url
