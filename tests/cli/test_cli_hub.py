"""The commands with ids of the Hub, which is a stand-in on this machine."""

import os
import subprocess
import sys

import models
import pytest
import tokenizers
import transformers
from hub_server import HubServer

from t2n_hf.store.manifest import ExportManifest

TOKEN = "hf_" + "CommandLineWritesHere0123456789"
COMMAND = "import torch; torch.set_num_threads(1); from t2n_hf.cli.main import main; main()"
UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1])
api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with HubServer(tmp_path_factory.mktemp("hub"), {TOKEN: ("alice", "write")}) as server:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        yield {
            **kept,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }


def run(environment, code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert TOKEN not in done.stdout + done.stderr
    return done


def t2n_hf(environment, *arguments):
    done = run(environment, COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def exported(environment, tmp_path_factory):
    """An export of a checkpoint that is on the Hub."""
    source = models.saved(models.m1(), tmp_path_factory.mktemp("source"))
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0").save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    (source / "LICENSE").write_text("free")
    assert run(environment, UPLOAD, "alice/tiny", source).returncode == 0
    out = tmp_path_factory.mktemp("exported") / "out"
    t2n_hf(environment, "export", "alice/tiny", out, "--no-check")
    return out


def test_an_export_of_a_hub_id_names_it_and_its_commit_and_has_its_tokenizer_and_licence(exported):
    manifest = ExportManifest.read(exported)
    assert manifest.source["id"] == "alice/tiny"
    assert len(manifest.source["revision"]) == 40
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(manifest.files)
    assert (exported / "LICENSE").read_text() == "free"
    card = (exported / "README.md").read_text()
    assert "base_model: alice/tiny" in card
    assert "license: mit" in card


@pytest.mark.tract
def test_an_export_is_pushed_pulled_and_generates_by_its_id(environment, exported, tmp_path):
    url = t2n_hf(environment, "push", exported, "alice/tiny-nnef", "--private", "-m", "First")
    assert "alice/tiny-nnef" in url
    pulled = t2n_hf(environment, "pull", "alice/tiny-nnef", "--to", tmp_path / "pulled").strip()
    assert pulled == str(tmp_path / "pulled")
    ExportManifest.read(pulled).verify(pulled)
    options = ["--prompt", "w1 w2 w3", "--max-new-tokens", "6"]
    by_id = t2n_hf(environment, "generate", "alice/tiny-nnef", *options)
    assert by_id == t2n_hf(environment, "generate", exported, *options)
    assert by_id == t2n_hf(environment, "generate", "alice/tiny", *options)
    assert len(by_id.split()) == 6


def test_a_model_that_is_not_on_the_hub_is_one_clear_message(environment, tmp_path):
    done = run(environment, COMMAND, "export", "alice/nothing-like-it", tmp_path / "out", "--no-check")
    assert done.returncode == 1
    assert done.stderr.startswith("t2n-hf: ")
    assert "alice/nothing-like-it" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


LOADED = """
import sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from t2n_hf import export_nnef
export_nnef(AutoModelForCausalLM.from_pretrained("alice/tiny"), sys.argv[1], check=False)
"""


def test_a_model_that_was_loaded_from_the_hub_remembers_where_it_came_from(environment, exported, tmp_path):
    done = run(environment, LOADED, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert ExportManifest.read(tmp_path / "out").to_json() == ExportManifest.read(exported).to_json()
