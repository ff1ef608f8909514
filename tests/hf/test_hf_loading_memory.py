"""Loading packed weights takes the memory of the packed model, and little more at any moment."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers as hf

from t2n_hf import T2NConfig
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

ALLOWANCE = 50 << 20  # the pages of files that are given back from time to time, and buffers for chunks
PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from t2n_hf import T2NConfig

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

def load(folder, **options):
    config = T2NConfig(compute="fast", **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)

def measured(folder, **options):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = status("VmRSS")
    model = load(folder, **options)
    held = sum(getattr(p, "opaque_nbytes", p.nbytes) for p in model.parameters())
    print(json.dumps({"peak": status("VmHWM") - before, "held": held}))
    return model

small, large, saved = sys.argv[1:]
load(small, weights="q4_0")  # what is imported late is there
if not saved:
    measured(large, weights="none", embeddings="q4_0")
    sys.exit()
everything = {"weights": "q4_0", "embeddings": "q4_0", "lm_head": "q4_0"}
model = measured(large, **everything)
model.save_pretrained(saved)
del model
import gc
gc.collect()
measured(saved)
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux counts")


def test_a_fast_model_takes_no_second_copy_while_it_is_loaded_quantized_or_not(tmp_path):
    shape = {**models.SHAPE, "vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096}
    config = hf.LlamaConfig(**{**shape, "num_hidden_layers": 7, "tie_word_embeddings": False})
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        parameter.detach().view(-1).copy_(torch.arange(parameter.numel()).remainder_(251 + index).sub_(100).div(99))
    small, large = models.saved(models.m1(), tmp_path), models.saved(model, tmp_path)
    del model
    command = [sys.executable, "-c", PROGRAM, small, large, tmp_path / "saved"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    on_the_fly, packed = [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    assert on_the_fly["held"] > ALLOWANCE + (16 << 20)
    assert on_the_fly["peak"] <= on_the_fly["held"] + ALLOWANCE
    assert packed["held"] == on_the_fly["held"]
    assert packed["peak"] <= packed["held"] + ALLOWANCE


def test_a_large_table_is_quantized_some_rows_at_a_time(tmp_path):
    shape = {**models.SHAPE, "vocab_size": 100_001, "hidden_size": 512, "intermediate_size": 32, "num_hidden_layers": 1}
    source = hf.LlamaForCausalLM(hf.LlamaConfig(**{**shape, "tie_word_embeddings": True})).bfloat16()
    table = source.get_input_embeddings().weight.detach()
    table.view(-1).copy_(torch.arange(table.numel()).remainder_(25_013).sub_(9_000).div(9_999))
    small, large = models.saved(models.m1(), tmp_path), models.saved(source, tmp_path)
    config = T2NConfig("none", embeddings="q4_0")
    loaded = hf.AutoModelForCausalLM.from_pretrained(large, dtype=torch.bfloat16, quantization_config=config)
    whole = QTensorTractScaleOnly.quantize(table)
    assert torch.equal(loaded.get_input_embeddings().weight.q4_0, whole.q4_0)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, small, large, ""], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert table.nbytes > 2 * ALLOWANCE - (16 << 20)
    assert seen["peak"] <= seen["held"] + ALLOWANCE


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
def test_norms_do_not_keep_the_checkpoint_mapped(tmp_path, inference):
    source = models.m1()
    for index, parameter in enumerate(source.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    folder = models.saved(source, tmp_path)
    config = T2NConfig(weights="q4_0", embeddings="q4_0", lm_head="q4_0")
    with torch.inference_mode(inference):
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    plain = {name: one for name, one in model.named_parameters() if not isinstance(one, OpaqueTensor)}
    assert len(plain) == 1 + 2 * source.config.num_hidden_layers
    for name, parameter in plain.items():
        assert torch.equal(parameter, source.get_parameter(name))
