"""Tiny models with layers that keep a state, one for each kind of recurrence and of hybrid: `recurrent("jamba")`."""

from typing import Any

import torch
import transformers as hf
from models import SHAPE, build

_TOKENS: dict[str, Any] = {key: SHAPE[key] for key in SHAPE if key.endswith("token_id") or key == "vocab_size"}
_STATES: dict[str, Any] = {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}

# Name -> prefix of the classes, options.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**_STATES, "state_size": 8}),
    "falcon_mamba": ("FalconMamba", {**_STATES, "state_size": 8}),
    "mamba2": ("Mamba2", {**_STATES, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}),
    "jamba": (
        "Jamba",
        {
            **SHAPE,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
    "bamba": ("Bamba", {**SHAPE, **_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**SHAPE, **_MAMBA2, "mamba_d_ssm": 128}),
    "zamba": (
        "Zamba",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **SHAPE,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "chunk_size": 4,
            "num_mem_blocks": 1,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 4,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SHAPE,
            **_MAMBA2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "qwen3_next": ("Qwen3Next", {**SHAPE, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybrid", {**SHAPE, **_DELTA, "linear_num_value_heads": 2, "head_dim": None}),
    "kimi_linear": (
        "KimiLinear",
        {
            **SHAPE,
            **_LATENT,
            "q_lora_rank": None,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("Lfm2", {**SHAPE, "layer_types": ["conv", "full_attention"]}),
    "zaya": ("Zaya", SHAPE),
    "rwkv": ("Rwkv", {**_STATES, "num_hidden_layers": 3, "rescale_every": 2}),
    "minimax": (
        "MiniMax",
        {
            **SHAPE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "block_size": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "xlstm": ("xLSTM", {**_STATES, "num_heads": 4, "chunk_size": 4}),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            **SHAPE,
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "recurrent", "attention"],
            "attention_window_size": 8,
            "lru_width": 64,
            "head_dim": 16,
        },
    ),
}

# They take no mask of padding, or do nothing with it.
WITHOUT_MASK = ("rwkv", "xlstm")


def recurrent(name: str) -> Any:
    """Make the model of that name."""
    prefix, options = RECURRENT[name]
    given = {key: value for key, value in options.items() if value is not None}
    return build(getattr(hf, f"{prefix}ForCausalLM"), getattr(hf, f"{prefix}Config")(**given))


def quieter(model: Any) -> Any:
    """The model with matrices scaled down: of those as loud as they are PyTorch too gives something else in f16."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.4)
    return model
