"""Tiny random models that are several graphs; weights are scaled up, so that masks and positions matter."""

from typing import Any

import models
import torch
import transformers as hf

VOCABULARY = 256
IMAGE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def t5(**changes: Any) -> Any:
    """T5: relative positions, a scaled head tied to the embeddings."""
    return models.build(hf.T5ForConditionalGeneration, hf.T5Config(**{**T5, **changes}))


def bart() -> Any:
    """BART: learned positions, a bias on the logits."""
    return models.build(hf.BartForConditionalGeneration, hf.BartConfig(**BART))


def marian() -> Any:
    """Marian: sinusoidal positions."""
    return models.build(hf.MarianMTModel, hf.MarianConfig(**BART))


def whisper() -> Any:
    """Whisper: an encoder of one length."""
    options = {key: value for key, value in BART.items() if key != "max_position_embeddings"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 32}
    nothing = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return models.build(
        hf.WhisperForConditionalGeneration, hf.WhisperConfig(**{**options, **tokens, **sizes, **nothing})
    )


def trocr() -> Any:
    """A vision transformer before a text decoder."""
    decoder = hf.TrOCRConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        cross_attention_hidden_size=64,
    )
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**IMAGE), decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return models.build(hf.VisionEncoderDecoderModel, config)


def pp_formulanet() -> Any:
    """PP-FormulaNet: its decoder attends to what the encoder calls its pooled output."""
    sizes = {"output_channels": 32, "post_conv_in_channels": 32, "post_conv_mid_channels": 32}
    wide = {"post_conv_out_channels": 64, "decoder_hidden_size": 64, "mlp_dim": 128}
    vision = {**IMAGE, **sizes, **wide, "image_size": 64, "window_size": 4, "global_attn_indexes": [1]}
    config = hf.PPFormulaNetConfig(vision_config=vision, text_config={**BART, "is_encoder_decoder": True})
    return models.build(hf.PPFormulaNetForConditionalGeneration, config)


def moonshine() -> Any:
    """Moonshine: waveforms of any length, rotary positions."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY}
    both = {
        f"{side}_num_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("hidden_layers", 2), ("attention_heads", 4))
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return models.build(hf.MoonshineForConditionalGeneration, hf.MoonshineConfig(**sizes, **both, **tokens))


def speech_to_text() -> Any:
    """Speech2Text: frames of any length, halved twice."""
    options = {key: value for key, value in BART.items() if key != "max_position_embeddings"}
    sizes = {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 100, "max_target_positions": 32}
    return models.build(hf.Speech2TextForConditionalGeneration, hf.Speech2TextConfig(**{**options, **sizes}))


def llava(**changes: Any) -> Any:
    """Llava: the patches of a CLIP image among the tokens of a Llama; token 255 stands for a patch."""
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**IMAGE),
        text_config=hf.LlamaConfig(**models.SHAPE),
        image_token_id=255,
        vision_feature_layer=-1,
        image_seq_length=16,
        **changes,
    )
    return models.build(hf.LlavaForConditionalGeneration, config)


def inputs_for(model: Any, batch: int = 2, length: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """What the encoder of an encoder-decoder model takes; of text the last row ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "pixel_values": (batch, 3, *[64 if model.config.model_type == "pp_formulanet" else 32] * 2),
        "input_features": (batch, 16, 100) if model.config.model_type == "whisper" else (batch, 76, 16),
        "input_values": (batch, 5000),
    }
    if model.main_input_name in shapes:
        return {model.main_input_name: torch.randn(shapes[model.main_input_name], generator=generator)}
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, -3:] = 0
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator),
        "attention_mask": mask,
    }
