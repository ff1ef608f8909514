"""Architectures whose checkpoints are kept in ways of their own: fused or turned experts, several towers, odd ties."""

import models
import pytest
import torch
import transformers as hf
from quantize_cases import content, saved_packed

from t2n_hf import T2NConfig, quantize_checkpoint

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 256, **SMALL}
EXPERTS = {**models.SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def gpt_oss():
    return hf.GptOssForCausalLM, hf.GptOssConfig(**EXPERTS, head_dim=16, sliding_window=8)


def llama4():
    options = {"intermediate_size_mlp": 128, "head_dim": 16, "interleave_moe_layer_step": 1}
    return hf.Llama4ForCausalLM, hf.Llama4TextConfig(**{**EXPERTS, **options, "num_experts_per_tok": 1})


def granite_moe():
    return hf.GraniteMoeForCausalLM, hf.GraniteMoeConfig(**EXPERTS)


def qwen3_vl_moe():
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 8}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    text = {**models.SHAPE, **models.EXPERTS, "head_dim": 16, "rope_parameters": MROPE, "moe_intermediate_size": 64}
    config = hf.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return hf.Qwen3VLMoeForConditionalGeneration, config


def t5():
    return hf.T5ForConditionalGeneration, hf.T5Config(
        vocab_size=256, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16
    )


def clip():
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    return hf.CLIPModel, hf.CLIPConfig(text_config=TEXT, vision_config=vision)


def bert_classifier():
    return hf.BertForSequenceClassification, hf.BertConfig(**TEXT)


@pytest.mark.parametrize("make", [gpt_oss, llama4, granite_moe, qwen3_vl_moe, t5, clip, bert_classifier])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["stored", "bf16"])
def test_the_folder_is_that_of_load_and_save(make, dtype, tmp_path):
    source = models.build(*make())
    checkpoint = models.saved(source, tmp_path)
    config = T2NConfig(modules_to_not_convert=[])
    expected = saved_packed(source, checkpoint, tmp_path, config, dtype=dtype or "auto")
    quantize_checkpoint(checkpoint, tmp_path / "out", config=config, dtype=dtype)
    assert content(tmp_path / "out") == content(expected)


def test_fused_experts_are_read_one_at_a_time(tmp_path):
    for make in (gpt_oss, llama4, granite_moe):
        source = models.build(*make())
        report = quantize_checkpoint(models.saved(source, tmp_path), tmp_path / make.__name__, dry_run=True)
        fused = max(parameter.nbytes for name, parameter in source.named_parameters() if "expert" in name)
        assert report.largest_read <= max(fused // 4, 256 * 64 * 4)
