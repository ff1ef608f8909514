import json
from types import SimpleNamespace

import pytest

from t2n_hf.errors import ConfigError
from t2n_hf.export.side_files import copy_companions, save_tokenizer, scrub, write_config


@pytest.mark.parametrize(
    "place",
    ["/home/someone/models/x", "/data/out/", "~/models/x", "C:\\models\\x", "d:/models/x", "file:///srv/x"],
    ids=str,
)
def test_a_value_that_is_a_local_path_is_dropped_wherever_it_is(place):
    assert scrub({"a": place, "b": {"c": place, "d": 1}, "e": [place, 2]}) == {"b": {"d": 1}, "e": [2]}


@pytest.mark.parametrize(
    "text", ["/", "and/or", "org/name", "</s>", "https://huggingface.co/x", "a sentence / a"], ids=str
)
def test_other_text_stays(text):
    assert scrub({"a": text}) == {"a": text}


def test_keys_that_tell_of_the_machine_are_dropped():
    found = scrub({"_name_or_path": "x", "name_or_path": "y", "_commit_hash": "z", "is_local": True, "hidden": 4})
    assert found == {"hidden": 4}


def test_a_token_that_looks_like_a_path_stays():
    data = {"added_tokens_decoder": {"7": {"content": "/usr/bin"}}}
    assert scrub(data) == data


def test_scrubbing_leaves_its_argument_alone():
    data = {"a": {"_name_or_path": "x"}}
    scrub(data)
    assert data == {"a": {"_name_or_path": "x"}}


def test_a_config_is_written_scrubbed_with_its_keys_in_order(tmp_path):
    config = SimpleNamespace(
        to_diff_dict=lambda: {"b": 1, "a": 2, "_name_or_path": "/tmp/x/y", "quantization_config": {}}
    )
    write_config(config, tmp_path, "config.json")
    assert (tmp_path / "config.json").read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'


def test_tokenizer_and_licence_files_are_taken_from_the_checkpoint_and_nothing_else(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    (source / "tokenizer.json").write_text('{"model": "/a/b"}')
    (source / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "/a/b", "pad_token": "<pad>"}))
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ y }}")
    (source / "LICENSE").write_text("free")
    (source / ".env").write_text("secret")
    (source / "model.safetensors").write_bytes(b"weights")
    copy_companions(source, target, tokenizer=True)
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert files == [
        "LICENSE",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"pad_token": "<pad>"}
    assert (target / "tokenizer.json").read_text() == '{"model": "/a/b"}'


def test_only_licence_files_are_taken_when_the_tokenizer_comes_from_elsewhere(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "NOTICE.txt").write_text("thanks")
    copy_companions(tmp_path / "source", tmp_path / "target", tokenizer=False)
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["NOTICE.txt"]


def test_a_tokenizer_object_saves_itself_and_its_files_are_scrubbed(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            with open(f"{folder}/tokenizer_config.json", "w") as file:
                json.dump({"tokenizer_file": "/home/a/b.json", "pad_token": "p"}, file)

    save_tokenizer(Tokenizer(), tmp_path, tmp_path / "scratch")
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"pad_token": "p"}
    assert not (tmp_path / "scratch").exists()


def test_something_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="of type int has no save_pretrained"):
        save_tokenizer(3, tmp_path, tmp_path / "scratch")
