"""What a stranger's checkpoint may do, what an export tells of where it was made, and that it needs nothing else."""

import json
import os
import shutil
import sys

import models
import pytest
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from typer.testing import CliRunner

from t2n_hf import T2NConfig, TractModelForCausalLM, export_nnef
from t2n_hf.cli.main import app
from t2n_hf.errors import T2NError, UnknownTagError
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.hub.card import read_card_metadata
from t2n_hf.store.manifest import ExportManifest

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(4, 256))]


def add_tokenizer(folder):
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    return folder


@pytest.mark.tract
@pytest.mark.parametrize("options", [{}, {"weights": "q4_0"}], ids=["f32", "q4_0"])
def test_an_export_generates_alone_when_checkpoint_and_folder_of_origin_are_gone(options, tmp_path):
    (tmp_path / "made").mkdir()
    source = add_tokenizer(models.saved(models.m1(), tmp_path / "made"))
    quantization = {"quantization_config": T2NConfig()} if options else {}
    plain = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **quantization)
    tokenizer = AutoTokenizer.from_pretrained(source)
    inputs = tokenizer("w7 w99 w42 w200", return_tensors="pt")
    expected = plain.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=8, do_sample=False)
    export_nnef(source, tmp_path / "made" / "out", check=False, **options)
    del plain, tokenizer
    (tmp_path / "made" / "out").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "moved")
    inputs = tokenizer("w7 w99 w42 w200", return_tensors="pt")
    with TractModelForCausalLM.from_pretrained(tmp_path / "moved", timeout_s=60) as model:
        got = model.generate(inputs.input_ids, max_new_tokens=8, do_sample=False)
    assert got.tolist() == expected.tolist()
    assert tokenizer.decode(got[0]) == tokenizer.decode(expected[0])


@pytest.mark.parametrize("how", ["folder", "loaded", "loaded and gone"])
def test_a_local_folder_that_is_called_like_a_repository_is_no_base_model(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice").mkdir()
    saved = models.saved(models.m1(), tmp_path)
    saved.rename(tmp_path / "alice" / "secret-model")
    name = "alice/secret-model"
    model = name if how == "folder" else AutoModelForCausalLM.from_pretrained(name)
    if how == "loaded and gone":
        shutil.rmtree(tmp_path / "alice")
    export_nnef(model, tmp_path / "out", check=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in read_card_metadata(card)
    assert ExportManifest.read(tmp_path / "out").source == {"id": None, "revision": None}
    for path in (tmp_path / "out").iterdir():
        data = path.read_bytes()
        assert b"secret-model" not in data, path.name
        assert str(tmp_path).encode() not in data, path.name


_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).mkdir(exist_ok=True)
class TouchyConfig(LlamaConfig):
    model_type = "touchy"
class TouchyForCausalLM(LlamaForCausalLM):
    config_class = TouchyConfig
"""


@pytest.fixture
def touchy(tmp_path, monkeypatch):
    """A checkpoint with code of its own, which leaves a folder `ran` when it is run; whoever is asked says yes."""
    folder = add_tokenizer(models.saved(models.m1(), tmp_path))
    (folder / "touchy.py").write_text(_CODE.format(mark=str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "touchy.TouchyConfig", "AutoModelForCausalLM": "touchy.TouchyForCausalLM"}
    config |= {"model_type": "touchy", "architectures": ["TouchyForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_code_of_a_checkpoint_is_not_run_even_for_somebody_who_says_yes_to_every_question(touchy, tmp_path):
    for load in (load_checkpoint, lambda folder: load_checkpoint(folder, task="text-generation")):
        with pytest.raises(T2NError, match="trust_remote_code"):
            load(touchy)
    with pytest.raises(T2NError, match="trust_remote_code"):
        export_nnef(touchy, tmp_path / "out", check=False)
    for command in (["export", str(touchy), str(tmp_path / "out")], ["generate", str(touchy), "--prompt", "w7"]):
        done = CliRunner().invoke(app, command, input="y\n" * 9)
        assert done.exit_code != 0
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_code_of_a_checkpoint_runs_when_the_user_says_so_and_does_not_follow_the_export(touchy, tmp_path):
    report = export_nnef(touchy, tmp_path / "out", check=False, trust_remote_code=True)
    assert (tmp_path / "ran").is_dir()
    os.rmdir(tmp_path / "ran")
    assert "auto_map" not in json.loads((report.folder / "config.json").read_text())
    assert not list(report.folder.glob("*.py"))


def test_code_that_an_export_names_is_not_run_by_who_generates_with_it(touchy, tmp_path):
    export_nnef(models.m1(), tmp_path / "out", check=False)
    for name in ("config.json", "touchy.py"):
        shutil.copyfile(touchy / name, tmp_path / "out" / name)
    with pytest.raises((T2NError, ValueError)):
        TractModelForCausalLM.from_pretrained(tmp_path / "out", verify=False)
    assert not (tmp_path / "ran").exists()


def test_a_saved_tag_that_no_plugin_declares_says_what_to_install(tmp_path):
    packed = AutoModelForCausalLM.from_pretrained(models.saved(models.m1(), tmp_path), quantization_config=T2NConfig())
    folder = models.saved(packed, tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("t2n_hf.q4_0.v1", "acme_bits.int3.v2"))
    for load in (load_checkpoint, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UnknownTagError, match=r"acme_bits\.int3\.v2.*t2n_hf\.q4_0\.v1.*pip install acme-bits"):
            load(folder)
    with torch.no_grad(), pytest.raises(UnknownTagError):
        export_nnef(folder, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()
