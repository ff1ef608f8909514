"""Models of several inputs, or of others than pictures, sounds and texts: series, prompts, films, ids of colours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import transformers as hf
from torch import nn

from zoo.audio import noise
from zoo.decoders import LLAMA_LIKE
from zoo.entry import Entry, plain_entry, token_ids
from zoo.vision import VIT, pictures

__all__ = ["MODELS"]

Sizes = Mapping[str, int]
_HIDDEN: Final = ("last_hidden_state",)
_NO_CACHE: Final = {"use_cache": False}
_BATCHES: Final = ({"B": 2}, {"B": 1}, {"B": 3})
_TEXT: Final = {**LLAMA_LIKE, "num_key_value_heads": 4, "max_position_embeddings": 64}
_SERIES: Final = {
    "prediction_length": 6,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def _entry(
    name: str,
    family: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[Sizes], dict[str, torch.Tensor]],
    outputs: Sequence[str],
    *,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    sizes: Sequence[Sizes] = _BATCHES,
    **options: Any,
) -> Entry:
    """Entry whose first `sizes` are those of the example; the first axis of each input is B when nothing is said."""

    by_key = axes or {key: {0: "B"} for key in inputs(sizes[0])}
    facts = {"inputs": inputs, "axes": by_key, "outputs": outputs, "options": options, "most": {"S": 50}}
    return plain_entry(name, family, make, sizes, **facts)


def _films(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {"pixel_values_videos": pictures(sizes["B"], 4, 3, 32, 32)}


def _patches(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": pictures(sizes["B"], 16, 192),
        "pixel_attention_mask": torch.ones(sizes["B"], 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4]] * sizes["B"]),
    }


def _prompted(sizes: Sizes) -> dict[str, torch.Tensor]:
    points = torch.rand(sizes["B"], 1, 2, 2, generator=torch.Generator().manual_seed(1))
    return {
        "pixel_values": pictures(sizes["B"], 3, 64, 64),
        "input_points": points * 60,
        "input_labels": torch.ones(sizes["B"], 1, 2, dtype=torch.int64),
    }


def _sam() -> nn.Module:
    vision = {
        **{"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 64},
        "num_pos_feats": 8,
    }
    prompts = {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}
    masks = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    masks["iou_head_hidden_dim"] = 16
    config = hf.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    return hf.SamModel(config)


def _three_pictures(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {name: pictures(sizes["B"], 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def _seggpt() -> nn.Module:
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8, "mlp_dim": 64}
    sizes = {"image_size": [64, 32], "pretrain_image_size": 32, "decoder_hidden_size": 16, "merge_index": 0}
    return hf.SegGptForImageSegmentation(hf.SegGptConfig(**vision, **sizes, intermediate_hidden_state_indices=[1, 2]))


def _past(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {"past_values": noise(sizes["B"], 32, 3)}


_PATCHED: Final = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 8,
}


def _past_and_future(sizes: Sizes) -> dict[str, torch.Tensor]:
    batch = sizes["B"]
    return {
        "past_values": noise(batch, 15),
        "past_time_features": noise(batch, 15, 2),
        "past_observed_mask": torch.ones(batch, 15),
        "future_values": noise(batch, 6),
        "future_time_features": noise(batch, 6, 2),
    }


def _text_and_picture(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(sizes["B"], 9), "pixel_values": pictures(sizes["B"], 3, 32, 32)}


def _clipseg() -> nn.Module:
    sizes = {"projection_dim": 32, "extract_layers": [0, 1], "reduce_dim": 16, "decoder_num_attention_heads": 2}
    vision = {**VIT, "num_hidden_layers": 3}
    return hf.CLIPSegForImageSegmentation(
        hf.CLIPSegConfig(text_config=_TEXT, vision_config=vision, **sizes, decoder_intermediate_size=32)
    )


def _flat_patches(sizes: Sizes) -> dict[str, torch.Tensor]:
    batch = sizes["B"]
    return {
        "flattened_patches": torch.cat([torch.ones(batch, 12, 2), pictures(batch, 12, 48)], -1),
        "attention_mask": torch.ones(batch, 12),
        "decoder_input_ids": token_ids(batch, 6),
    }


def _pix2struct() -> nn.Module:
    text = {"vocab_size": 256, "hidden_size": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    vision = {"hidden_size": 64, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 16, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "seq_len": 32}
    return hf.Pix2StructForConditionalGeneration(hf.Pix2StructConfig(text_config=text, vision_config=vision))


def _picture_in_text(count: int, side: int, *, decoder: bool = False) -> Callable[[Sizes], dict[str, torch.Tensor]]:
    """One picture, whose features are in the place of `count` tokens 250, before S others."""

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        ids = torch.cat([torch.full((1, count), 250), token_ids(1, sizes["S"], 249)], 1)
        more = {"decoder_input_ids": token_ids(1, 4)} if decoder else {}
        return {"pixel_values": pictures(1, 3, side, side), "input_ids": ids, **more}

    return inputs


_LENGTHS: Final = ({"S": 5}, {"S": 9}, {"S": 3})
_TEXT_AXIS: Final = {"input_ids": {1: "S"}}


def _blip2() -> nn.Module:
    queries = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128}
    text |= {"word_embed_proj_dim": 64, "max_position_embeddings": 128}
    config = hf.Blip2Config(
        vision_config=dict(VIT),
        qformer_config={**queries, "encoder_hidden_size": 64, "vocab_size": 64},
        text_config=hf.OPTConfig(**text).to_dict(),
        num_query_tokens=4,
        image_token_index=250,
    )
    return hf.Blip2ForConditionalGeneration(config)


def _florence2() -> nn.Module:
    text = {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    text |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    vision = {"embed_dim": [16, 16, 32, 32], "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4}
    return hf.Florence2ForConditionalGeneration(
        hf.Florence2Config(
            vision_config={**vision, "window_size": 2, "projection_dim": 64},
            text_config=hf.BartConfig(**text).to_dict(),
            image_token_id=250,
        )
    )


def _kosmos2() -> nn.Module:
    text = {"vocab_size": 256, "embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 128}
    text["max_position_embeddings"] = 64
    config = hf.Kosmos2Config(text_config=text, vision_config=dict(VIT), latent_query_num=4)
    return hf.Kosmos2ForConditionalGeneration(config)


def _marked_places(sizes: Sizes) -> dict[str, torch.Tensor]:
    places = torch.tensor([[0, 1, 1, 1, 1] + [0] * sizes["S"]])
    ids = token_ids(1, sizes["S"] + 5)
    return {"pixel_values": pictures(1, 3, 32, 32), "input_ids": ids, "image_embeds_position_mask": places}


def _vjepa2() -> nn.Module:
    sizes = {"crop_size": 32, "frames_per_clip": 4, "tubelet_size": 2, "patch_size": 8, "hidden_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "pred_hidden_size": 24, "pred_num_hidden_layers": 1}
    return hf.VJEPA2Model(hf.VJEPA2Config(**sizes, mlp_ratio=2, pred_num_attention_heads=2))


def _siglip2() -> nn.Module:
    vision = {key: value for key, value in VIT.items() if key != "image_size"}
    return hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**vision, num_patches=16))


def _imagegpt() -> nn.Module:
    config = hf.ImageGPTConfig(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
    return hf.ImageGPTForImageClassification(config)


def _xclip() -> nn.Module:
    vision = {**VIT, "mit_hidden_size": 32, "mit_intermediate_size": 64, "mit_num_hidden_layers": 1, "num_frames": 2}
    config = hf.XCLIPConfig(
        text_config=_TEXT,
        vision_config={**vision, "mit_num_attention_heads": 2},
        projection_dim=32,
        prompt_layers=1,
        prompt_num_attention_heads=2,
    )
    return hf.XCLIPModel(config)


def _titled_films(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(3, 9), "pixel_values": pictures(sizes["B"], 2, 3, 32, 32)}


MODELS: Final = (
    _entry("vjepa2", "vision", _vjepa2, _films, _HIDDEN, skip_predictor=True),
    _entry("imagegpt", "vision", _imagegpt, lambda sizes: {"input_ids": token_ids(sizes["B"], 16, 60)}, ("logits",)),
    _entry("siglip2", "vision", _siglip2, _patches, _HIDDEN),
    _entry("sam", "vision", _sam, _prompted, ("pred_masks", "iou_scores")),
    _entry("seggpt", "vision", _seggpt, _three_pictures, ("pred_masks",)),
    _entry(
        "patchtst",
        "audio",
        lambda: hf.PatchTSTForPrediction(
            hf.PatchTSTConfig(**_PATCHED, d_model=32, num_attention_heads=2, num_hidden_layers=2, ffn_dim=64)
        ),
        _past,
        ("prediction_outputs",),
    ),
    _entry(
        "patchtsmixer",
        "audio",
        lambda: hf.PatchTSMixerForPrediction(hf.PatchTSMixerConfig(**_PATCHED, d_model=16, num_layers=2)),
        _past,
        ("prediction_outputs",),
    ),
    _entry(
        "time_series_transformer",
        "audio",
        lambda: hf.TimeSeriesTransformerModel(hf.TimeSeriesTransformerConfig(**_SERIES)),
        _past_and_future,
        _HIDDEN,
        **_NO_CACHE,
    ),
    _entry("clipseg", "multimodal", _clipseg, _text_and_picture, ("logits",)),
    _entry("pix2struct", "multimodal", _pix2struct, _flat_patches, ("logits",), **_NO_CACHE),
    _entry("x_clip", "multimodal", _xclip, _titled_films, ("logits_per_video",), axes={"pixel_values": {0: "B"}}),
    _entry("blip_2", "multimodal", _blip2, _picture_in_text(4, 32), ("logits",), axes=_TEXT_AXIS, sizes=_LENGTHS),
    _entry(
        "florence2",
        "multimodal",
        _florence2,
        _picture_in_text(5, 64, decoder=True),
        ("logits",),
        axes=_TEXT_AXIS,
        sizes=_LENGTHS,
        **_NO_CACHE,
    ),
    _entry(
        "kosmos2",
        "multimodal",
        _kosmos2,
        _marked_places,
        ("logits",),
        axes={"input_ids": {1: "S"}, "image_embeds_position_mask": {1: "S"}},
        sizes=_LENGTHS,
        **_NO_CACHE,
    ),
)
