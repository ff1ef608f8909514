"""Causal language models whose layers are attention and a dense network."""

from collections.abc import Mapping
from typing import Any, Final

from zoo.entry import VOCABULARY, Entry, Generator, built, config_of

__all__ = ["LLAMA_LIKE", "MODELS", "TOKENS", "generator"]

TOKENS: Final = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE: Final = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_SMALL: Final = {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2_LIKE: Final = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_BOTH_KINDS: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def generator(
    name: str,
    stem: str,
    base: Mapping[str, Any] = LLAMA_LIKE,
    *,
    model: str | None = None,
    config: str | None = None,
    exported: Mapping[str, Any] | None = None,
    without_past: bool = False,
    **options: Any,
) -> Entry:
    """Entry of the class `<stem>ForCausalLM` with a `<stem>Config`; None takes an option out of `base`."""

    def make() -> Generator:
        settings = config_of(config or f"{stem}Config", {**base, **options})
        made = built(model or f"{stem}ForCausalLM", settings)
        return Generator(model=made, options=exported or {}, without_past=without_past)

    return Entry(name=name, family="decoder", make=make)


_GEMMA: Final = {"head_dim": 16, "query_pre_attn_scalar": 16}

MODELS: Final = (
    generator("llama", "Llama"),
    generator(
        "llama_rope_llama3",
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    generator(
        "llama_rope_yarn",
        "Llama",
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    generator("llama_biased", "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    generator("mistral", "Mistral", sliding_window=8),
    generator("qwen2", "Qwen2"),
    generator("qwen3", "Qwen3", head_dim=16),
    generator("gemma", "Gemma", head_dim=16),
    generator("gemma2", "Gemma2", sliding_window=8, **_GEMMA),
    generator("gemma3_text", "Gemma3", config="Gemma3TextConfig", **_BOTH_KINDS, **_GEMMA),
    generator(
        "gemma3n_text",
        "Gemma3n",
        config="Gemma3nTextConfig",
        **_BOTH_KINDS,
        head_dim=16,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.0],
        intermediate_size=[128, 128],
    ),
    generator(
        "gemma4_text",
        "Gemma4",
        config="Gemma4TextConfig",
        **_BOTH_KINDS,
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
    generator("phi", "Phi", num_key_value_heads=4),
    generator("phi3", "Phi3"),
    generator("gpt2", "GPT2", _GPT2_LIKE, model="GPT2LMHeadModel"),
    generator("gpt_bigcode", "GPTBigCode", _GPT2_LIKE),
    generator(
        "gpt_neo",
        "GPTNeo",
        TOKENS,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=128,
    ),
    generator("gpt_neox", "GPTNeoX", num_key_value_heads=None),
    generator("gptj", "GPTJ", _GPT2_LIKE, rotary_dim=8),
    generator("codegen", "CodeGen", _GPT2_LIKE, rotary_dim=8),
    generator("openai_gpt", "OpenAIGPT", _GPT2_LIKE, model="OpenAIGPTLMHeadModel", without_past=True),
    generator("opt", "OPT", _SMALL, ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=128),
    generator("bloom", "Bloom", TOKENS, hidden_size=64, n_layer=2, n_head=4),
    generator("falcon", "Falcon", _SMALL, new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    generator("falcon_alibi", "Falcon", _SMALL, alibi=True),
    generator("mpt", "Mpt", TOKENS, d_model=64, n_heads=4, n_layers=2, max_seq_len=128),
    generator("starcoder2", "Starcoder2", sliding_window=8),
    generator("stablelm", "StableLm"),
    generator("persimmon", "Persimmon", num_key_value_heads=None),
    generator("olmo", "Olmo"),
    generator("olmo2", "Olmo2"),
    generator("olmo3", "Olmo3", **_BOTH_KINDS),
    generator("cohere", "Cohere"),
    generator("cohere2", "Cohere2", **_BOTH_KINDS),
    generator("granite", "Granite"),
    generator("nemotron", "Nemotron"),
    generator("helium", "Helium", head_dim=16),
    generator("arcee", "Arcee"),
    generator("apertus", "Apertus"),
    generator("seed_oss", "SeedOss", head_dim=16),
    generator("ernie4_5", "Ernie4_5", head_dim=16),
    generator("exaone4", "Exaone4", **_BOTH_KINDS),
    generator("diffllama", "DiffLlama"),
    generator("vaultgemma", "VaultGemma", **_BOTH_KINDS, **_GEMMA),
    generator("smollm3", "SmolLM3"),
    generator("glm", "Glm", head_dim=16),
    generator("glm4", "Glm4", head_dim=16),
    generator("hunyuan_v1_dense", "HunYuanDenseV1", head_dim=16),
    generator("bitnet", "BitNet"),
    generator("nanochat", "NanoChat"),
    generator(
        "modernbert_decoder",
        "ModernBertDecoder",
        num_key_value_heads=None,
        local_attention=8,
        cls_token_id=1,
        sep_token_id=2,
    ),
    generator("biogpt", "BioGpt", num_key_value_heads=None),
    generator(
        "xglm", "XGLM", TOKENS, d_model=64, num_layers=2, attention_heads=4, ffn_dim=128, max_position_embeddings=128
    ),
    generator(
        "bert_decoder", "Bert", model="BertLMHeadModel", config="BertConfig", is_decoder=True, num_key_value_heads=None
    ),
)
