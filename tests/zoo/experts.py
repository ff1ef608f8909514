"""Causal language models with a mixture of experts."""

from typing import Any, Final

from zoo.decoders import LLAMA_LIKE, generator

__all__ = ["MODELS"]

_FOUR: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2}
_FOUR_LOCAL: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK: Final[dict[str, Any]] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_BOTH_KINDS: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: Final = (
    generator("mixtral", "Mixtral", **_FOUR_LOCAL, sliding_window=None),
    generator(
        "qwen2_moe",
        "Qwen2Moe",
        **_FOUR,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    generator("qwen3_moe", "Qwen3Moe", **_FOUR, head_dim=16, moe_intermediate_size=32, decoder_sparse_step=1),
    generator("phimoe", "Phimoe", **_FOUR_LOCAL, sliding_window=8),
    generator("olmoe", "Olmoe", **_FOUR),
    generator("granitemoe", "GraniteMoe", **_FOUR_LOCAL),
    generator("jetmoe", "JetMoe", {**LLAMA_LIKE, "num_attention_heads": None}, **_FOUR_LOCAL, kv_channels=16),
    generator("gpt_oss", "GptOss", **_FOUR_LOCAL, **_BOTH_KINDS, head_dim=16),
    generator("deepseek_v2", "DeepseekV2", **_DEEPSEEK, n_group=2, topk_group=1),
    generator("deepseek_v3", "DeepseekV3", **_DEEPSEEK, n_group=2, topk_group=1),
    generator(
        "glm4_moe",
        "Glm4Moe",
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    generator(
        "dots1",
        "Dots1",
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    generator(
        "ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0
    ),
    generator("hunyuan_v1_moe", "HunYuanMoEV1", head_dim=16, num_experts=4, moe_topk=2),
    generator("minimax_m2", "MiniMaxM2", **_FOUR_LOCAL, head_dim=16),
    generator("flex_olmo", "FlexOlmo", **_FOUR),
    generator(
        "llama4_text",
        "Llama4",
        config="Llama4TextConfig",
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        attention_chunk_size=8,
    ),
)
