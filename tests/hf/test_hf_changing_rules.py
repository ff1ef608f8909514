"""Rules of transformers that change values but not shapes are followed, wherever a weight lives and is rounded."""

import models
import pytest
import torch
import transformers as hf
from quantize_cases import content
from transformers import conversion_mapping
from transformers.core_model_loading import Interleave, WeightConverter

from t2n_hf import T2NConfig, quantize_checkpoint
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.quant.q4_0_blocks import quantize_rows

UP = "model.layers.0.mlp.up_proj.weight"
DISK = {"": "disk"}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A model in float32 whose up_proj is stored with its rows interleaved, as a rule now says."""
    folder = models.saved(models.m1(), tmp_path)
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    rule = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(dim=0)])
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "LlamaForCausalLM", [rule])
    return folder


def true_values(checkpoint):
    """What the rule makes of the stored values; plain transformers agrees."""
    stored = CheckpointIndex.open(checkpoint)[UP].read()
    made = torch.cat([stored[0::2], stored[1::2]])
    assert torch.equal(hf.LlamaForCausalLM.from_pretrained(checkpoint, dtype="auto").get_parameter(UP), made)
    return made


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_are_what_the_rule_makes_of_them(device_map, dtype, checkpoint):
    model = hf.LlamaForCausalLM.from_pretrained(
        checkpoint, quantization_config=T2NConfig("none"), device_map=device_map, dtype=dtype
    )
    assert torch.equal(model.get_parameter(UP) + 0, true_values(checkpoint).to(dtype))


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_made_of_what_the_rule_makes(device_map, dtype, checkpoint, tmp_path):
    model = hf.LlamaForCausalLM.from_pretrained(
        checkpoint, quantization_config=T2NConfig(), device_map=device_map, dtype=dtype
    )
    expected = quantize_rows(true_values(checkpoint).to(dtype))
    first = models.saved(model, tmp_path)
    assert torch.equal(CheckpointIndex.open(first)[f"{UP}_q4_0"].read(), expected)
    quantize_checkpoint(checkpoint, tmp_path / "out", dtype=dtype)
    assert content(tmp_path / "out") == content(first)
