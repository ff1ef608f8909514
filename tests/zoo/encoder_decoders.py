"""Encoder-decoders as one graph: ids, padding mask and decoder ids in, logits out."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from pipeline_models import BART, T5

from zoo.entry import VOCABULARY, Entry, PlainModule, built, config_of, token_ids

__all__ = ["DECODED", "MODELS", "padded", "text_pair"]

DECODED: Final = {0: "B", 1: "T"}


def padded(batch: int, length: int) -> torch.Tensor:
    """A padding mask, [batch, length] i64: every row but the first ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, max(1, 2 * length // 3) :] = 0
    return mask


def text_pair(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Ids and mask of B texts of length S, and T decoder ids for each."""
    batch, source, target = sizes["B"], sizes["S"], sizes["T"]
    return {
        "input_ids": token_ids(batch, source),
        "attention_mask": padded(batch, source),
        "decoder_input_ids": token_ids(batch, target, seed=1),
    }


def _translator(name: str, model: str, config: str, base: Mapping[str, Any], **options: Any) -> Entry:
    def make() -> PlainModule:
        return PlainModule(
            model=built(model, config_of(config, {**base, **options})),
            inputs=text_pair,
            axes={"input_ids": {0: "B", 1: "S"}, "attention_mask": {0: "B", 1: "S"}, "decoder_input_ids": DECODED},
            traced={"B": 2, "S": 12, "T": 7},
            tested=[{"B": 1, "S": 9, "T": 4}, {"B": 3, "S": 17, "T": 11}, {"B": 3, "S": 5, "T": 1}],
            options={"use_cache": False},
            most={"S": 60, "T": 60},
        )

    return Entry(name=name, family="encoder-decoder", make=make)


MODELS: Final = (
    _translator("t5", "T5ForConditionalGeneration", "T5Config", T5),
    _translator("mt5", "MT5ForConditionalGeneration", "MT5Config", T5, feed_forward_proj="gated-gelu"),
    _translator("umt5", "UMT5ForConditionalGeneration", "UMT5Config", T5),
    _translator("longt5", "LongT5ForConditionalGeneration", "LongT5Config", T5, local_radius=4),
    _translator(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    _translator("bart", "BartForConditionalGeneration", "BartConfig", BART),
    _translator("mbart", "MBartForConditionalGeneration", "MBartConfig", BART),
    _translator("marian", "MarianMTModel", "MarianConfig", BART),
    _translator("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART),
    _translator("plbart", "PLBartForConditionalGeneration", "PLBartConfig", BART),
    _translator("mvp", "MvpForConditionalGeneration", "MvpConfig", BART),
    _translator("m2m100", "M2M100ForConditionalGeneration", "M2M100Config", BART),
    _translator("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART),
    _translator("blenderbot_small", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", BART),
    _translator(
        "fsmt",
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        {**BART, "vocab_size": None},
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    ),
    _translator(
        "led",
        "LEDForConditionalGeneration",
        "LEDConfig",
        {**BART, "max_position_embeddings": None},
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _translator(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {**BART, "d_model": None, "encoder_layers": None, "decoder_layers": None},
        hidden_size=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
    ),
    _translator(
        "nllb_moe",
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        BART,
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=64,
    ),
)
