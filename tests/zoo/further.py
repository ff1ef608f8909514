"""Further causal language models and text encoders, less used or newer than those of the other files."""

from typing import Any, Final

from zoo.decoders import LLAMA_LIKE, TOKENS, generator
from zoo.encoders import BERT_LIKE, encoder

__all__ = ["MODELS"]

_KINDS: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
_ROUTED: Final[dict[str, Any]] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1}
_SIDES: Final = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "max_position_embeddings": 128,
}

MODELS: Final = (
    generator("afmoe", "Afmoe", head_dim=16, num_experts=4, **_KINDS, moe_intermediate_size=32, num_experts_per_tok=2),
    generator("aria_text", "AriaText", moe_num_experts=4, moe_topk=2),
    generator("cohere2_moe", "Cohere2Moe", num_experts=4, num_experts_per_tok=2, **_KINDS),
    generator("cwm", "Cwm", head_dim=16, **_KINDS),
    generator("doge", "Doge"),
    generator("exaone_moe", "ExaoneMoe", head_dim=16, num_experts=4, **_KINDS, num_experts_per_tok=2),
    generator("glm4_moe_lite", "Glm4MoeLite", **_LATENT, **_ROUTED, n_routed_experts=8, n_group=2, topk_group=1),
    generator("gpt_neox_japanese", "GPTNeoXJapanese", num_key_value_heads=None),
    generator("granitemoeshared", "GraniteMoeShared", num_local_experts=4, shared_intermediate_size=64),
    generator("hyperclovax", "HyperCLOVAX"),
    generator("jais2", "Jais2"),
    generator("minicpm3", "MiniCPM3", **_LATENT),
    generator("ministral", "Ministral", head_dim=16, **_KINDS),
    generator("ministral3", "Ministral3", head_dim=16),
    generator("solar_open", "SolarOpen", head_dim=16, **_ROUTED, n_routed_experts=4),
    generator("youtu", "Youtu", **_LATENT),
    generator("emu3_text", "Emu3", config="Emu3TextConfig"),
    generator("phi4_multimodal_text", "Phi4Multimodal"),
    generator("ctrl", "CTRL", TOKENS, model="CTRLLMHeadModel", n_embd=64, n_layer=2, n_head=4, dff=128, n_positions=64),
    generator(
        "bert_generation",
        "BertGeneration",
        {**LLAMA_LIKE, "num_key_value_heads": None},
        model="BertGenerationDecoder",
        is_decoder=True,
    ),
    generator("data2vec_decoder", "Data2VecText", is_decoder=True, num_key_value_heads=None),
    generator("roc_bert_decoder", "RoCBert", is_decoder=True, num_key_value_heads=None),
    generator("xlm_roberta_xl_decoder", "XLMRobertaXL", is_decoder=True, num_key_value_heads=None),
    generator("bigbird_pegasus_decoder", "BigBirdPegasus", TOKENS, **_SIDES),
    encoder("xlm_roberta_xl", "XLMRobertaXLForMaskedLM", "XLMRobertaXLConfig", pad_token_id=1),
    encoder("data2vec_text", "Data2VecTextForMaskedLM", "Data2VecTextConfig", pad_token_id=1),
    encoder("ibert", "IBertForMaskedLM", "IBertConfig", pad_token_id=1),
    encoder("luke", "LukeForMaskedLM", "LukeConfig", entity_vocab_size=32, entity_emb_size=16),
    encoder("tapas", "TapasForMaskedLM", "TapasConfig"),
    encoder("roc_bert", "RoCBertForMaskedLM", "RoCBertConfig", pronunciation_vocab_size=32, shape_vocab_size=32),
    encoder("gte", "GteForMaskedLM", "GteConfig", {**BERT_LIKE, "num_key_value_heads": 4}),
    encoder("lilt", "LiltForTokenClassification", "LiltConfig", hidden_size=96),
    encoder("clap_text", "ClapTextModelWithProjection", "ClapTextConfig", output="text_embeds", pad_token_id=1),
)
