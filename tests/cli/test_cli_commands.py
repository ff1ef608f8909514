"""The commands on a small checkpoint with a tokenizer of its own, from export to generated text."""

import json
import sys

import models
import pytest
import tokenizers
import transformers

from t2n_hf.cli import main as cli
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.store.manifest import ExportManifest

PROMPT = "a b c d e"


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = models.saved(models.m1(), tmp_path_factory.mktemp("checkpoint"))
    vocabulary = {chr(97 + i % 26) + (str(i // 26) if i >= 26 else ""): i for i in range(256)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="a", eos_token="z9")
    tokenizer.chat_template = "{% for m in messages %}x {{ m['content'] }} y {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    assert (
        run("export", checkpoint, out, "--weights", "q4_0", "--embeddings", "q4_0", "--no-check", "--format", "tar")
        == 0
    )
    return out


@pytest.mark.tract
def test_an_export_is_reported_on_standard_output(checkpoint, tmp_path, capsys):
    assert run("export", checkpoint, tmp_path / "out", "--dtype", "f16", "--max-context", "40") == 0
    captured = capsys.readouterr()
    assert "model.nnef.tgz" in captured.out
    assert "check     passed" in captured.out
    assert captured.err == ""
    manifest = ExportManifest.read(tmp_path / "out")
    assert (manifest.dtype, manifest.max_context) == ("f16", 40)


def test_an_export_is_reported_as_json_for_scripts(checkpoint, tmp_path, capsys):
    assert run("export", checkpoint, tmp_path / "out", "--no-check", "--json", "--format", "dir") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["check"] == "skipped: not asked for"
    assert report["archive"].endswith("model")
    assert report["formats"]["f32"][0] > 10


def test_an_existing_folder_is_refused_and_replaced_with_overwrite(checkpoint, exported, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("export", checkpoint, out, "--no-check") == 0
    capsys.readouterr()
    assert run("export", checkpoint, out, "--no-check") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("t2n-hf: ")
    assert "exists already" in captured.err
    assert "Traceback" not in captured.err
    assert run("export", checkpoint, out, "--no-check", "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--dtype", "bf16"], 1, "no bf16"),
        (["--format", "zip"], 1, "format='zip'"),
        (["--weights", "q9"], 1, "q9"),
        (["--device-map", "{"], 2, "not JSON"),
        (["--device-map", "auto", "--max-memory", "cpu"], 2, "DEVICE=SIZE"),
        (["--level", "twelve"], 2, "--level"),
        (["--nonsense"], 2, "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_clear_message(arguments, code, text, checkpoint, tmp_path, capsys):
    assert run("export", checkpoint, tmp_path / "out", "--no-check", *arguments) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_one_clear_message(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run("export", tmp_path / "empty", tmp_path / "out", "--no-check") == 1
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--device-map", "cpu"], ["--device-map", "disk"], []], ids=" ".join)
def test_weights_can_live_anywhere_while_exporting(options, checkpoint, exported, tmp_path):
    quantize = ["--weights", "q4_0", "--embeddings", "q4_0", "--format", "tar"]
    assert run("export", checkpoint, tmp_path / "out", "--no-check", *quantize, *options) == 0
    assert (tmp_path / "out" / "model.nnef.tar").read_bytes() == (exported / "model.nnef.tar").read_bytes()


@pytest.mark.tract
@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["plain", "chat"])
def test_an_export_generates_what_the_checkpoint_with_the_same_weights_does(chat, checkpoint, exported, capsys):
    options = ["--prompt", PROMPT, "--max-new-tokens", "12", *chat]
    assert run("generate", exported, *options) == 0
    from_export = capsys.readouterr().out
    assert run("generate", checkpoint, *options, "--weights", "q4_0", "--embeddings", "q4_0") == 0
    from_checkpoint = capsys.readouterr().out
    assert len(from_export.split()) == 12
    assert from_export == from_checkpoint


@pytest.mark.tract
def test_a_seed_gives_the_same_sample_again(exported, capsys):
    options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--sample", "--temperature", "2.0", "--seed", "3"]
    texts = []
    for _ in range(2):
        assert run("generate", exported, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].strip()


def test_a_prompt_is_read_from_standard_input(checkpoint, capsys, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text(PROMPT)
    with open(tmp_path / "prompt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run("generate", checkpoint, "--prompt", "-", "--max-new-tokens", "2") == 0
    assert len(capsys.readouterr().out.split()) == 2


def test_sampling_options_need_sample(checkpoint, capsys):
    assert run("generate", checkpoint, "--prompt", PROMPT, "--temperature", "1") == 2
    assert "need --sample" in capsys.readouterr().err


def test_options_of_checkpoints_are_refused_for_an_export(exported, capsys):
    assert run("generate", exported, "--prompt", PROMPT, "--weights", "q4_0") == 1
    assert "weights is for checkpoints" in capsys.readouterr().err


def test_generating_without_a_tokenizer_is_one_clear_message(tmp_path, capsys):
    folder = models.saved(models.m1(), tmp_path)
    assert run("generate", folder, "--prompt", PROMPT) == 1
    assert "cannot load a tokenizer" in capsys.readouterr().err


def test_inspecting_an_export_shows_layers_formats_and_bytes(exported, capsys):
    assert run("inspect", exported) == 0
    out = capsys.readouterr().out
    assert out.startswith("export\n")
    assert "model.layers.*.mlp.up_proj.weight" in out
    assert "2 x  q4_0  [128, 64]" in out
    assert "q4_0" in out.splitlines()[-1]


@pytest.mark.parametrize("what", ["export", "archive", "checkpoint", "quantized checkpoint"])
def test_anything_that_holds_weights_can_be_inspected(what, checkpoint, exported, tmp_path, capsys):
    paths = {"export": exported, "archive": exported / "model.nnef.tar", "checkpoint": checkpoint}
    path = paths.get(what)
    if path is None:
        load_checkpoint(checkpoint, weights="q4_0").save_pretrained(tmp_path / "packed")
        path = tmp_path / "packed"
    assert run("inspect", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == what.split()[-1]
    assert found["bytes"] == sum(tensor["nbytes"] for tensor in found["tensors"])
    formats = {tensor["format"] for tensor in found["tensors"]}
    assert formats == ({"f32"} if what == "checkpoint" else {"f32", "q4_0"})


@pytest.mark.filterwarnings("ignore:only 0% of the values")
def test_inspecting_says_what_stayed_dense_and_why(tmp_path, capsys):
    source = models.saved(models.m9(), tmp_path)
    assert run("export", source, tmp_path / "out", "--weights", "q4_0", "--no-check") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "dense: model.layers.*.mlp.up_proj.weight (2): its last axis has 48 values" in out


@pytest.mark.parametrize("what", ["nothing", "empty folder", "text"])
def test_what_holds_no_weights_is_one_clear_message(what, tmp_path, capsys):
    path = tmp_path / "x"
    if what == "empty folder":
        path.mkdir()
    elif what == "text":
        path.write_text("hello")
    assert run("inspect", path) == 1
    assert capsys.readouterr().err.startswith("t2n-hf: ")


def test_pushing_what_is_no_export_is_one_clear_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert run("push", tmp_path, "owner/name") == 1
    assert "t2n_export.json" in capsys.readouterr().err


def test_pulling_into_a_folder_that_exists_is_one_clear_message(tmp_path, capsys):
    assert run("pull", "owner/name", "--to", tmp_path) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.tract
def test_the_folder_for_temporary_files_is_given_to_exports_and_to_checkpoints(checkpoint, tmp_path, capsys):
    options = ("--weights", "q4_0", "--spill-dir")
    assert run("export", checkpoint, tmp_path / "out", *options, tmp_path / "a") == 0
    assert run("generate", checkpoint, "--prompt", PROMPT, "--device-map", "disk", *options, tmp_path / "b") == 0
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").is_dir()
    capsys.readouterr()
    assert run("generate", tmp_path / "out", "--prompt", PROMPT, "--spill-dir", tmp_path) == 1
    assert "spill_dir is for checkpoints" in capsys.readouterr().err
