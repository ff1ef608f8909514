"""Tiny models with random weights, one for each kind of trouble: `m1()` to `m10()`. No network, no file.

Weights are drawn from a fixed seed and scaled up: with the default initialisation logits are so flat that faults hide.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


def build(model_class: type, config: Any, seed: int = 0) -> Any:
    """Make the model in eval mode, matrices scaled by 5, one-dimensional weights moved off their defaults."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def m1(**changes: Any) -> Any:
    """Llama, tied."""
    return build(hf.LlamaForCausalLM, hf.LlamaConfig(**{**SHAPE, "tie_word_embeddings": True, **changes}))


def m2(**changes: Any) -> Any:
    """Llama, untied; to be saved in shards: `saved(m2(), folder, max_shard_size="40KB")`."""
    return build(hf.LlamaForCausalLM, hf.LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **changes}))


def m3(**changes: Any) -> Any:
    """Qwen3 whose head_dim is not hidden_size / heads."""
    return build(hf.Qwen3ForCausalLM, hf.Qwen3Config(**{**SHAPE, "head_dim": 32, **changes}))


def m4(**changes: Any) -> Any:
    """Mixtral: 4 experts, fused into 3-D weights."""
    config = hf.MixtralConfig(
        **{**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, **changes}
    )
    return build(hf.MixtralForCausalLM, config)


def m4_qwen3(**changes: Any) -> Any:
    """Qwen3Moe: 4 experts, fused into 3-D weights."""
    return build(hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**{**SHAPE, **EXPERTS, "head_dim": 16, **changes}))


def m5(**changes: Any) -> Any:
    """Gemma3 text, 6 layers, sliding window of 8, tied."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    options = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    config = hf.Gemma3TextConfig(**{**SHAPE, **options, "layer_types": kinds, "tie_word_embeddings": True, **changes})
    return build(hf.Gemma3ForCausalLM, config)


def m6(**changes: Any) -> Any:
    """Phi3 with longrope: its frequencies change at 32 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.01 * i for i in range(8)],
        "long_factor": [2.0 + 0.1 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    }
    config = hf.Phi3Config(
        **{**SHAPE, "rope_parameters": rope, "original_max_position_embeddings": 32, "sliding_window": None, **changes}
    )
    return build(hf.Phi3ForCausalLM, config)


def m7(**changes: Any) -> Any:
    """Qwen3Next: linear attention, whose convolution weights are read without calling the convolution."""
    linear = {
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    config = hf.Qwen3NextConfig(**{**SHAPE, **EXPERTS, **linear, "head_dim": 16, **changes})
    return build(hf.Qwen3NextForCausalLM, config)


def m8(**changes: Any) -> Any:
    """M1 in bfloat16 (its rotary frequencies stay in float32, as they do when it is loaded)."""
    model = m1(**changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


def m9(**changes: Any) -> Any:
    """Llama of hidden size 48 and intermediate size 80, which are no multiples of 32."""
    return m1(**{"hidden_size": 48, "intermediate_size": 80, **changes})


def m10(**changes: Any) -> Any:
    """GPT-2: Conv1D keeps its weights as (in, out); tied."""
    options = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return build(hf.GPT2LMHeadModel, hf.GPT2Config(**{**options, **tokens, **changes}))


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """Save the model in a new folder under `folder` (tmp_path) and return that; `options` go to save_pretrained."""
    target = Path(folder) / f"{type(model).__name__}-{len(list(Path(folder).iterdir()))}"
    model.save_pretrained(target, **options)
    return target


def prompt(length: int = 12, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Token ids (batch, length), int64, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (batch, length), generator=generator)
