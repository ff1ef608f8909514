"""Causal language models with recurrent layers: state spaces, linear attention, convolutions, gated recurrences."""

from typing import Any, Final

from zoo.decoders import LLAMA_LIKE, TOKENS, generator

__all__ = ["MODELS"]

_STATES: Final[dict[str, Any]] = {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2}
_FOUR: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2}
_DELTA: Final[dict[str, Any]] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}

# transformers pads a text to whole chunks with steps of this length, which decay the state that it keeps: its own calls
# with a past differ from a run over the whole text by 1e-4.
_NO_FLOOR: Final = {"time_step_min": 1e-9, "time_step_floor": 1e-9}

MODELS: Final = (
    generator("mamba", "Mamba", _STATES, state_size=8),
    generator("mamba2", "Mamba2", _STATES, state_size=16, num_heads=8, head_dim=16, n_groups=1, chunk_size=8),
    generator("falcon_mamba", "FalconMamba", _STATES, state_size=8),
    generator("rwkv", "Rwkv", _STATES, attention_hidden_size=64, intermediate_size=128, context_length=64),
    generator(
        "recurrent_gemma",
        "RecurrentGemma",
        {**LLAMA_LIKE, "max_position_embeddings": None},
        num_hidden_layers=3,
        lru_width=64,
        attention_window_size=8,
        head_dim=16,
    ),
    generator(
        "jamba",
        "Jamba",
        **_FOUR,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    generator(
        "bamba",
        "Bamba",
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
    ),
    generator(
        "zamba2",
        "Zamba2",
        num_key_value_heads=4,
        mamba_d_state=16,
        mamba_headdim=16,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=8,
        layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1,
        **_NO_FLOOR,
        use_mamba_kernels=False,
        hybrid_layer_ids=[1],
    ),
    generator(
        "nemotron_h",
        "NemotronH",
        layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=8,
        **_NO_FLOOR,
        use_mamba_kernels=False,
    ),
    generator(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
    ),
    generator(
        "falcon_h1",
        "FalconH1",
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
        head_dim=16,
    ),
    generator(
        "qwen3_next", "Qwen3Next", **_DELTA, **_FOUR, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    generator("qwen3_5", "Qwen3_5", config="Qwen3_5TextConfig", **_DELTA),
    generator(
        "minimax",
        "MiniMax",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    generator("lfm2", "Lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    generator(
        "lfm2_moe",
        "Lfm2Moe",
        **_FOUR,
        moe_intermediate_size=32,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"],
    ),
    generator(
        "xlstm", "xLSTM", TOKENS, config="xLSTMConfig", hidden_size=64, num_hidden_layers=2, num_heads=4, chunk_size=8
    ),
)
