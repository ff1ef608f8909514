"""A real model, from its checkpoint folder to text that tract generates."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from t2n_hf import TractModelForCausalLM
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.nnef.archive import ArchiveReader

pytestmark = [pytest.mark.model, pytest.mark.tract]

QUANTIZED = {"weights": "q4_0", "embeddings": "q4_0"}
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "Water boils at",
)
TOKENS = 20


@pytest.fixture(scope="module")
def exported(smollm2, tmp_path_factory):
    """(folder, report) of an export by the command line, in a process of its own."""
    out = tmp_path_factory.mktemp("smollm2") / "out"
    options = [text for name, value in QUANTIZED.items() for text in (f"--{name}", value)]
    program = "import torch; torch.set_num_threads(1); from t2n_hf.cli.main import main; main()"
    command = [sys.executable, "-c", program, "export", str(smollm2), str(out), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out, json.loads(done.stdout)


def test_the_check_passes_and_the_archive_holds_what_the_weights_take(exported):
    _, report = exported
    assert report["check"] == "passed"
    assert report["max_rel_error"] < 5e-5
    parameters = 134_515_008
    assert report["weight_bytes"] == pytest.approx(parameters * 18 / 32, rel=0.01)
    assert report["dense"] == {}


def test_the_graph_is_short_enough_to_read(exported):
    _, report = exported
    text = ArchiveReader(report["archive"]).text()
    assert len(text.splitlines()) <= 500
    assert len(text) <= 70_000


def test_tract_generates_the_tokens_of_pytorchs_exact_path(exported, smollm2):
    folder, _ = exported
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_checkpoint(smollm2, device_map=None, **QUANTIZED)
    with TractModelForCausalLM.from_pretrained(folder) as archive, torch.no_grad():
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            options = {"max_new_tokens": TOKENS, "do_sample": False}
            assert archive.generate(**inputs, **options).tolist() == model.generate(**inputs, **options).tolist()
