"""Quantizing takes the memory of two tensors, however large the model is, and of one expert where they are fused."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers as hf

ALLOWANCE = 50 << 20  # buffers for chunks, and what imports bring in late
PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
import transformers
from t2n_hf import quantize_checkpoint

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

small, *models = sys.argv[1:]
quantize_checkpoint(small, small + "-out")  # what is imported late is there
for model in models:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = status("VmRSS")
    report = quantize_checkpoint(model, model + "-out")
    print(json.dumps({"peak": status("VmHWM") - before, "read": report.bytes_before, "largest": report.largest_read}))
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux counts")


def built(model_class, config, folder):
    """A model in bfloat16 with cheap values."""
    with torch.device("meta"):
        model = model_class(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        parameter.detach().view(-1).copy_(torch.arange(parameter.numel()).remainder_(251 + index).sub_(100).div(99))
    model.config.dtype = torch.bfloat16
    return models.saved(model, folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    shape = {**models.SHAPE, "vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 8192}
    config = hf.LlamaConfig(**{**shape, "num_hidden_layers": 4, "tie_word_embeddings": False})
    plain = built(hf.LlamaForCausalLM, config, folder)
    shape = {**models.SHAPE, "num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1024}
    config = hf.MixtralConfig(**shape, num_local_experts=80, num_experts_per_tok=2, sliding_window=None)
    fused = built(hf.MixtralForCausalLM, config, folder)
    command = [sys.executable, "-c", PROGRAM, models.saved(models.m4(), folder), plain, fused]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_a_model_of_many_weights_takes_the_memory_of_two(measured):
    largest = 8192 * 1024 * 2
    assert measured[0]["read"] > 14 * largest
    assert measured[0]["largest"] == largest
    assert measured[0]["peak"] <= 2 * largest + ALLOWANCE


def test_fused_experts_take_the_memory_of_one(measured):
    expert, fused = 2 * 1024 * 512 * 2, 80 * 2 * 1024 * 512 * 2
    assert measured[1]["largest"] == expert
    assert measured[1]["peak"] <= 2 * expert + ALLOWANCE < fused
