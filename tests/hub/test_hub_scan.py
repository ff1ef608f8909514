import io
import json
import os
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest
from hub_folders import GRAPH, make_export, write_archive, write_manifest
from hub_processes import TOKEN

from t2n_hf.errors import LeakError
from t2n_hf.hub.needles import LocalFacts
from t2n_hf.hub.scan import refuse_leaks
from t2n_hf.hub.stage import stage

FACTS = LocalFacts(
    token=TOKEN,
    paths=("/srv/joanna/work", "/tmp", "/opt", r"D:\data\joanna"),
    names=("joanna", "blackbird", "user", "vm"),
)
OTHER_TOKEN = "hf_" + "Q" * 24
LEAKS = {
    "a token": (OTHER_TOKEN, "a Hugging Face token"),
    "the token in use": (f"x{TOKEN}", "the token in use"),
    "a folder of this process": ("see /srv/joanna/work/run.py", "a path of this machine"),
    "the temporary folder": ("see /tmp/abc", "a path of this machine"),
    "a Windows folder of this process": (r"see D:\data\joanna", "a path of this machine"),
    "the home folder": ("in /opt/models", "a path of this machine"),
    "somebody's home": ("in /home/somebody/models", "a path in a user's folder"),
    "a Mac home": ("in /Users/somebody/models", "a path in a user's folder"),
    "a Windows home": (r"in C:\Users\somebody", "a path in a user's folder"),
    "a file address": ("file:///etc/hosts", "a file:// address"),
    "the user": ("made by joanna.", "the name of this user"),
    "the host": ("made on blackbird:", "the name of this user or machine"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----", "a private key"),
    "a GitHub token": ("ghp_" + "a" * 36, "a GitHub token"),
}
HARMLESS = [
    "joannas blackbirds",
    "the user says vm, in C:\\windows",
    "https://example.org/tmp/x and https://example.org/home/x/y",
    "/opt and /tmp alone",
    "hf_short",
    "/srv/joannas/workshop",
    "ratio 1:/home",
]


def refusal(files, facts=FACTS):
    with pytest.raises(LeakError) as refused:
        refuse_leaks(files, facts)
    return str(refused.value)


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
@pytest.mark.parametrize("name", ["README.md", "LICENSE", "config.json", "chat_template.jinja"])
def test_a_planted_leak_is_told_by_file_line_and_kind_and_not_by_value(name, leak):
    value, kind = leak
    text = refusal({"clean.txt": b"clean", name: b"first line\n" + value.encode()})
    assert f"{name}, line 2: {kind}" in text
    assert "clean.txt" not in text
    assert value not in text
    assert "joanna" not in text


@pytest.mark.parametrize("text", HARMLESS)
def test_words_that_only_look_like_a_leak_pass(text):
    refuse_leaks({"README.md": text.encode()}, FACTS)


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
@pytest.mark.parametrize("place", ["value", "key", "list", "twice"])
def test_an_escaped_spelling_in_json_hides_nothing(place, leak):
    value, kind = leak
    escaped = '"' + "".join(f"\\u{ord(letter):04x}" for letter in value) + '"'
    content = {
        "value": f'{{"a": {escaped}}}',
        "key": f"{{{escaped}: 1}}",
        "list": f'{{"a": [1, [{escaped}]]}}',
        "twice": f'{{"a": {escaped}, "a": 1}}',
    }[place]
    assert f"config.json: {kind}" in refusal({"config.json": content.encode()})


def test_a_folder_that_only_begins_like_one_of_ours_passes():
    facts = LocalFacts(paths=("/srv/joanna/work",))
    refuse_leaks({"README.md": b"/srv/joanna/workshop and /srv/joanna/work-2"}, facts)
    refusal({"README.md": b"/srv/joanna/work"}, facts)


def test_every_word_may_be_in_a_vocabulary_but_no_secret_and_no_path():
    words = {"joanna": 0, "blackbird": 1, "file://": 2, "/tmp": 3}
    tokenizer = {"model": {"vocab": words, "merges": [["joan", "joanna"]]}, "added_tokens": []}
    refuse_leaks({"tokenizer.json": json.dumps(tokenizer).encode(), "vocab.json": json.dumps(words).encode()}, FACTS)
    refuse_leaks({"merges.txt": b"joan na\njoanna /tmp"}, FACTS)
    assert "a Hugging Face token" in refusal({"vocab.json": json.dumps({OTHER_TOKEN: 0}).encode()})
    assert "a path of this machine" in refusal({"merges.txt": b"/srv/joanna/work/x y"})
    assert "name of this user" in refusal({"tokenizer.json": json.dumps({"made_by": "joanna"}).encode()})


def test_a_leak_across_two_pieces_of_a_large_file_is_found(tmp_path):
    path = tmp_path / "large.txt"
    path.write_bytes(b"\n" * ((1 << 22) - 5) + OTHER_TOKEN.encode())
    assert f"large.txt, line {(1 << 22) - 4}: a Hugging Face token" in refusal({"large.txt": path})


def test_a_binary_file_is_searched_for_secrets():
    assert "the token in use" in refusal({"tokenizer.model": b"\0\1" + TOKEN.encode() + b"\0"})


def test_a_name_that_leaks_is_not_told():
    text = refusal({"joanna-notes.json": b"{}"})
    assert "the name of a listed file" in text
    assert "joanna" not in text


@pytest.mark.parametrize("format", ["tgz", "tar"])
@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_the_graph_inside_an_archive_is_searched(tmp_path, format, leak):
    value, kind = leak
    path = tmp_path / f"model.nnef.{format}"
    write_archive(path, format=format, nbytes=4000, graph=f"{GRAPH}# {value}\n")
    text = refusal({path.name: path})
    assert f"{path.name}, graph.nnef, line 8: {kind}" in text
    assert value not in text


def test_names_of_members_are_searched(tmp_path):
    path = tmp_path / "model.nnef.tgz"
    write_archive(path, nbytes=4000, label="joanna/w")
    assert "model.nnef.tgz, the name of a member: the name of this user" in refusal({path.name: path})


def pack(path, mode="w:gz", **fields):
    with tarfile.open(path, mode) as tar:
        info = tarfile.TarInfo("graph.nnef")
        info.size = len(GRAPH)
        for name, value in fields.items():
            setattr(info, name, value)
        tar.addfile(info, io.BytesIO(GRAPH.encode()))


@pytest.mark.parametrize("field", ["uname", "gname"])
def test_who_packed_an_archive_is_searched(tmp_path, field):
    path = tmp_path / "model.nnef.tgz"
    pack(path, **{field: "joanna"})
    assert "model.nnef.tgz, who packed it: the name of this user" in refusal({path.name: path})


def test_the_file_name_in_a_gzip_header_is_searched(tmp_path):
    path = tmp_path / "model.nnef.tgz"
    pack(tmp_path / "joanna.tar.gz")
    path.write_bytes((tmp_path / "joanna.tar.gz").read_bytes())
    assert "who packed it" in refusal({path.name: path})


def test_what_is_private_about_this_process_is_gathered(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "joanna")
    facts = LocalFacts.gather(TOKEN, tmp_path / "export")
    assert {str(Path.home()), os.getcwd(), tempfile.gettempdir(), str(tmp_path)} <= set(facts.paths)
    assert {"joanna", socket.gethostname()} <= set(facts.names)
    assert TOKEN not in repr(facts)


def test_the_owner_of_the_repository_is_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("LOGNAME", "joanna")
    assert "joanna" not in LocalFacts.gather(None, tmp_path, public_ids=["joanna/tiny"]).names
    assert "joanna" not in LocalFacts.gather(None, tmp_path, public_ids=["acme/tiny-joanna"]).names


@pytest.mark.parametrize("format", ["tgz", "tar", "dir"])
def test_an_export_without_leaks_passes(tmp_path, format):
    folder = make_export(tmp_path / "export", format=format)
    refuse_leaks(stage(folder, "alice/tiny").files, FACTS)


@pytest.mark.parametrize("place", ["README.md", "config.json", "graph.nnef"])
def test_a_push_with_a_leak_sends_nothing(worker, server, repo, tmp_path, place):
    folder = make_export(tmp_path / "export")
    if place == "graph.nnef":
        write_archive(folder / "model.nnef.tgz", graph=f"{GRAPH}# {OTHER_TOKEN}")
    else:
        (folder / place).write_text(json.dumps({"a": OTHER_TOKEN}))
    write_manifest(folder)
    answer = worker.push(folder, repo)
    assert answer.error[0] == "LeakError"
    assert OTHER_TOKEN not in answer.text + answer.trace
    assert server.log == []


def test_a_commit_message_with_a_leak_sends_nothing(worker, server, repo, tmp_path):
    answer = worker.push(make_export(tmp_path / "export"), repo, commit_message=f"with {TOKEN}")
    assert answer.error[0] == "LeakError"
    assert TOKEN not in answer.text + answer.trace
    assert server.log == []
