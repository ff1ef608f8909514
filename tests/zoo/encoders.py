"""Text encoders: ids and a padding mask in."""

from collections.abc import Mapping
from typing import Any, Final

from zoo.entry import VOCABULARY, Encoder, Entry, built, config_of

__all__ = ["BERT_LIKE", "MODELS", "encoder"]

BERT_LIKE: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DEBERTA: Final = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_WORDS: Final = {"vocab_size": VOCABULARY}


def encoder(
    name: str,
    model: str,
    config: str,
    base: Mapping[str, Any] = BERT_LIKE,
    *,
    output: str = "logits",
    called: Mapping[str, Any] | None = None,
    **options: Any,
) -> Entry:
    def make() -> Encoder:
        return Encoder(model=built(model, config_of(config, {**base, **options})), output=output, options=called or {})

    return Entry(name=name, family="encoder", make=make)


MODELS: Final = (
    encoder("bert", "BertForMaskedLM", "BertConfig"),
    encoder("bert_classifier", "BertForSequenceClassification", "BertConfig"),
    encoder("bert_answers", "BertForTokenClassification", "BertConfig"),
    encoder("bert_model", "BertModel", "BertConfig", output="last_hidden_state"),
    encoder("roberta", "RobertaForMaskedLM", "RobertaConfig", pad_token_id=1),
    encoder("xlm_roberta", "XLMRobertaForTokenClassification", "XLMRobertaConfig", pad_token_id=1),
    encoder("camembert", "CamembertForMaskedLM", "CamembertConfig", pad_token_id=1),
    encoder("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", pad_token_id=1),
    encoder(
        "distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        _WORDS,
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=64,
    ),
    encoder("electra", "ElectraForMaskedLM", "ElectraConfig", embedding_size=32),
    encoder("albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=32),
    encoder("mpnet", "MPNetForMaskedLM", "MPNetConfig", pad_token_id=1),
    encoder("deberta", "DebertaForSequenceClassification", "DebertaConfig", **_DEBERTA),
    encoder(
        "deberta_v2",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        **_DEBERTA,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    encoder(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        num_hidden_layers=3,
        local_attention=8,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    encoder("nomic_bert", "NomicBertModel", "NomicBertConfig", output="last_hidden_state", num_key_value_heads=4),
    encoder("eurobert", "EuroBertForMaskedLM", "EuroBertConfig", num_key_value_heads=4),
    encoder("jina_embeddings_v3", "JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", output="last_hidden_state"),
    encoder("roformer", "RoFormerForMaskedLM", "RoFormerConfig", embedding_size=64),
    encoder("rembert", "RemBertForMaskedLM", "RemBertConfig", input_embedding_size=32, output_embedding_size=32),
    encoder("megatron_bert", "MegatronBertForMaskedLM", "MegatronBertConfig"),
    encoder("convbert", "ConvBertForMaskedLM", "ConvBertConfig", embedding_size=64, conv_kernel_size=3),
    encoder("squeezebert", "SqueezeBertForMaskedLM", "SqueezeBertConfig", embedding_size=64),
    encoder("esm", "EsmForMaskedLM", "EsmConfig", mask_token_id=5, position_embedding_type="rotary"),
    encoder("layoutlm_text", "LayoutLMForMaskedLM", "LayoutLMConfig"),
    encoder("ernie", "ErnieForMaskedLM", "ErnieConfig"),
    encoder(
        "xlnet",
        "XLNetModel",
        "XLNetConfig",
        _WORDS,
        output="last_hidden_state",
        d_model=64,
        n_layer=2,
        n_head=4,
        d_inner=128,
    ),
    encoder(
        "xlm",
        "XLMModel",
        "XLMConfig",
        _WORDS,
        output="last_hidden_state",
        emb_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    encoder(
        "flaubert",
        "FlaubertModel",
        "FlaubertConfig",
        _WORDS,
        output="last_hidden_state",
        emb_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    encoder(
        "mobilebert",
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        embedding_size=32,
        true_hidden_size=32,
        intra_bottleneck_size=32,
    ),
    encoder("longformer", "LongformerForMaskedLM", "LongformerConfig", attention_window=12, pad_token_id=1),
    encoder("big_bird", "BigBirdForMaskedLM", "BigBirdConfig", attention_type="original_full"),
    encoder(
        "nystromformer", "NystromformerForMaskedLM", "NystromformerConfig", segment_means_seq_len=64, num_landmarks=64
    ),
    encoder(
        "funnel",
        "FunnelForMaskedLM",
        "FunnelConfig",
        _WORDS,
        d_model=64,
        n_head=4,
        d_head=16,
        d_inner=128,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    encoder("fnet", "FNetForMaskedLM", "FNetConfig"),
    encoder(
        "canine",
        "CanineForSequenceClassification",
        "CanineConfig",
        num_hash_buckets=64,
        num_hash_functions=2,
        downsampling_rate=4,
        local_transformer_stride=12,
    ),
)
