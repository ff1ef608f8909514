"""`t2n-hf calibrate`: the file that it makes, its exit codes, and that nothing is said where no one looks."""

import json

import models
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from t2n_hf import Importance
from t2n_hf.cli import main as cli


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, arguments)])
    return end.value.code


@pytest.fixture
def checkpoint(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate("?abcdefghij")}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("a b c d e f g h i j " * 5, encoding="utf-8")
    return tmp_path / "text.txt"


def test_what_it_measures_is_what_quantize_takes(checkpoint, text, tmp_path, capfd):
    out = tmp_path / "importance.safetensors"
    assert run("calibrate", checkpoint, out, "--text", text, "--text", text, "--max-tokens", 80, "--window", 32) == 0
    said = capfd.readouterr()
    assert said.out == f"{out}: 16 weights of {checkpoint.name}, measured on 80 tokens\n"
    assert said.err == ""
    assert Importance.load(out).tokens == 80
    assert run("quantize", checkpoint, tmp_path / "packed", "--importance", out) == 0


def test_json_says_the_same(checkpoint, text, tmp_path, capsys):
    assert run("calibrate", checkpoint, tmp_path / "out", "--text", text, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(tmp_path / "out"), "weights": 16, "tokens": 50, "source": checkpoint.name}


def test_an_older_file_is_kept_unless_it_is_to_be_replaced(checkpoint, text, tmp_path, capsys):
    (tmp_path / "out").write_text("older")
    assert run("calibrate", checkpoint, tmp_path / "out", "--text", text) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "older"
    assert run("calibrate", checkpoint, tmp_path / "out", "--text", text, "--overwrite") == 0


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [(b"", 1, "no tokens"), (b"\xff\xfe", 1, "not UTF-8"), (None, 1, "missing.txt")],
    ids=["empty", "binary", "missing"],
)
def test_texts_that_are_none_are_refused(content, code, said, checkpoint, tmp_path, capsys):
    file = tmp_path / "missing.txt"
    if content is not None:
        file.write_bytes(content)
    assert run("calibrate", checkpoint, tmp_path / "out", "--text", file) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_it_needs_a_text_and_a_folder_to_write_to(checkpoint, text, tmp_path):
    assert run("calibrate", checkpoint, tmp_path / "out") == 2
    assert run("calibrate", checkpoint, tmp_path / "nowhere" / "out", "--text", text) == 2
