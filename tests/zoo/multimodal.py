"""Models of pictures and text, or of sound and text, as one graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import transformers as hf

from zoo.decoders import LLAMA_LIKE
from zoo.encoder_decoders import DECODED
from zoo.encoders import BERT_LIKE
from zoo.entry import VOCABULARY, Entry, plain_entry, token_ids
from zoo.vision import VIT, pictures

__all__ = ["MODELS"]

_IMAGE: Final = 255
_TEXT: Final = {**BERT_LIKE, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
_IDS: Final = {0: "B", 1: "S"}
_NO_CACHE: Final = {"use_cache": False}
_BATCHED: Final = [{"B": 2, "S": 10}, {"B": 1, "S": 7}, {"B": 3, "S": 13}]
_LONGER: Final = [{"S": 24}, {"S": 21}, {"S": 33}]

Sizes = Mapping[str, int]


def _entry(
    name: str,
    make: Callable[[], Any],
    inputs: Callable[[Sizes], dict[str, torch.Tensor]],
    axes: Mapping[str, Mapping[int, str]],
    sizes: Sequence[Sizes],
    outputs: Sequence[str] = ("logits",),
    options: Mapping[str, Any] | None = None,
) -> Entry:
    least, most = {"S": 20} if sizes is _LONGER else {}, {"S": 32} if sizes is _BATCHED else {}
    facts = {"inputs": inputs, "axes": axes, "outputs": outputs, "options": options or {}, "least": least, "most": most}
    return plain_entry(name, "multimodal", make, sizes, **facts)


def _pictures(sizes: Sizes) -> torch.Tensor:
    return pictures(sizes["B"], 3, 32, 32)


def _text_and_picture(sizes: Sizes) -> dict[str, torch.Tensor]:
    ids = token_ids(sizes["B"], sizes["S"])
    ids[:, -1] = 2  # the end of the text, where contrastive models look
    return {"input_ids": ids, "pixel_values": _pictures(sizes)}


def _prompt(tokens: int, *, types: bool = False, shape: Sequence[int] = (1, 3, 32, 32)) -> Any:
    """A function that makes a prompt with room for one picture of `tokens` tokens."""

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        ids = token_ids(1, sizes["S"], 250)
        ids[:, 1 : 1 + tokens] = _IMAGE
        marks = {"token_type_ids": (ids == _IMAGE).long()} if types else {}
        return {"input_ids": ids, "pixel_values": pictures(*shape), **marks}

    return inputs


def _clip_like(model: str, config: str, text: Mapping[str, Any] = _TEXT, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(hf, model)(getattr(hf, config)(text_config=dict(text), vision_config=dict(VIT), **options))


def _llava(model: str, config: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        parts = {"vision_config": hf.CLIPVisionConfig(**VIT), "text_config": hf.LlamaConfig(**LLAMA_LIKE)}
        return getattr(hf, model)(
            getattr(hf, config)(**parts, image_token_id=_IMAGE, image_token_index=_IMAGE, **options)
        )

    return make


def _paligemma() -> Any:
    text = hf.GemmaConfig(**LLAMA_LIKE, head_dim=16)
    vision = hf.SiglipVisionConfig(**VIT, projection_dim=64)
    config = hf.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=_IMAGE,
        image_token_id=_IMAGE,
        projection_dim=64,
        hidden_size=64,
    )
    config.text_config.num_image_tokens = 16
    return hf.PaliGemmaForConditionalGeneration(config)


def _smolvlm() -> Any:
    text = {"model_type": "llama", **LLAMA_LIKE}
    return hf.SmolVLMForConditionalGeneration(
        hf.SmolVLMConfig(vision_config=dict(VIT), text_config=text, image_token_id=_IMAGE, scale_factor=2)
    )


def _smolvlm_vision() -> Any:
    return _smolvlm().model.vision_model


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    text = {
        "model_type": "gemma3_text",
        **LLAMA_LIKE,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": kinds,
    }
    vision = {"model_type": "siglip_vision_model", **VIT}
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config=vision,
            text_config=text,
            mm_tokens_per_image=4,
            image_token_index=_IMAGE,
            image_token_id=_IMAGE,
        )
    )


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "mlp_ratio": 2,
    }
    marks = {"image_token_id": 255, "video_token_id": 254, "vision_start_token_id": 253, "vision_end_token_id": 252}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(text_config={**LLAMA_LIKE, "rope_parameters": rope}, vision_config=vision, **marks)
    )


def _trocr() -> Any:
    decoder = hf.TrOCRConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        cross_attention_hidden_size=64,
    )
    return hf.VisionEncoderDecoderModel(
        hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**VIT), decoder)
    )


def _blip() -> Any:
    text = {**BERT_LIKE, "encoder_hidden_size": 64, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
    return hf.BlipForConditionalGeneration(
        hf.BlipConfig(vision_config=dict(VIT), text_config=text, projection_dim=32, image_text_hidden_size=32)
    )


def _vilt() -> Any:
    return hf.ViltForQuestionAnswering(hf.ViltConfig(**{**BERT_LIKE, **VIT}, max_image_length=-1))


def _layoutlmv3() -> Any:
    sizes = {
        "input_size": 32,
        "patch_size": 8,
        "coordinate_size": 12,
        "shape_size": 8,
        "rel_pos_bins": 8,
        "max_rel_pos": 16,
        "rel_2d_pos_bins": 8,
        "max_rel_2d_pos": 16,
    }
    return hf.LayoutLMv3ForTokenClassification(hf.LayoutLMv3Config(**BERT_LIKE, **sizes))


def _boxes(sizes: Sizes) -> torch.Tensor:
    corners = torch.randint(0, 100, (sizes["B"], sizes["S"], 4), generator=torch.Generator().manual_seed(sizes["S"]))
    return corners.sort(-1).values


def _clap_audio() -> Any:
    return hf.ClapAudioModelWithProjection(
        hf.ClapAudioConfig(
            window_size=4,
            spec_size=64,
            num_mel_bins=16,
            patch_size=4,
            patch_stride=[4, 4],
            patch_embeds_hidden_size=16,
            depths=[1, 1],
            num_attention_heads=[2, 4],
            hidden_size=32,
            projection_dim=32,
            enable_fusion=False,
            num_classes=4,
        )
    )


def _vision_text() -> Any:
    vision, text = hf.CLIPVisionConfig(**VIT), hf.BertConfig(**BERT_LIKE)
    return hf.VisionTextDualEncoderModel(
        hf.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=32)
    )


def _git() -> Any:
    return hf.GitForCausalLM(hf.GitConfig(vision_config=dict(VIT), **_TEXT))


def _flava() -> Any:
    return hf.FlavaModel(
        hf.FlavaConfig(
            text_config=dict(_TEXT),
            image_config=dict(VIT),
            multimodal_config={
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "intermediate_size": 128,
            },
            projection_dim=32,
            hidden_size=64,
        )
    )


def _align() -> Any:
    vision = {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 64}
    return hf.AlignModel(hf.AlignConfig(text_config=dict(_TEXT), vision_config=vision, projection_dim=80))


def _owlvit() -> Any:
    return hf.OwlViTModel(hf.OwlViTConfig(text_config=dict(_TEXT), vision_config=dict(VIT), projection_dim=32))


def _internvl() -> Any:
    vision = hf.InternVLVisionConfig(**{**VIT, "image_size": [32, 32], "patch_size": [8, 8]})
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            vision_config=vision,
            text_config=hf.Qwen2Config(**LLAMA_LIKE),
            image_token_id=_IMAGE,
            downsample_ratio=0.5,
            image_seq_length=4,
        )
    )


_BOTH: Final = {"input_ids": _IDS, "pixel_values": {0: "B"}}
_SIMILAR: Final = ("logits_per_image", "text_embeds", "image_embeds")
_ONE_TEXT: Final = {"input_ids": {1: "S"}}
_MARKED: Final = {"input_ids": {1: "S"}, "token_type_ids": {1: "S"}}

MODELS: Final = (
    _entry(
        "clip", _clip_like("CLIPModel", "CLIPConfig", projection_dim=32), _text_and_picture, _BOTH, _BATCHED, _SIMILAR
    ),
    _entry(
        "siglip", _clip_like("SiglipModel", "SiglipConfig"), _text_and_picture, _BOTH, _BATCHED, ("logits_per_image",)
    ),
    _entry(
        "metaclip_2",
        _clip_like("MetaClip2Model", "MetaClip2Config", projection_dim=32),
        _text_and_picture,
        _BOTH,
        _BATCHED,
        _SIMILAR,
    ),
    _entry(
        "chinese_clip",
        _clip_like("ChineseCLIPModel", "ChineseCLIPConfig", projection_dim=32),
        _text_and_picture,
        _BOTH,
        _BATCHED,
        _SIMILAR,
    ),
    _entry(
        "altclip",
        _clip_like("AltCLIPModel", "AltCLIPConfig", {**_TEXT, "project_dim": 64}, projection_dim=32),
        _text_and_picture,
        _BOTH,
        _BATCHED,
        _SIMILAR,
    ),
    _entry("owlvit", _owlvit, _text_and_picture, _BOTH, _BATCHED, _SIMILAR),
    _entry("vision_text_dual_encoder", _vision_text, _text_and_picture, _BOTH, _BATCHED, _SIMILAR),
    _entry(
        "align",
        _align,
        lambda sizes: {"input_ids": token_ids(sizes["B"], sizes["S"]), "pixel_values": pictures(sizes["B"], 3, 64, 64)},
        _BOTH,
        _BATCHED,
        _SIMILAR,
    ),
    _entry("flava", _flava, _text_and_picture, _BOTH, _BATCHED, ("multimodal_embeddings",)),
    _entry(
        "llava",
        _llava("LlavaForConditionalGeneration", "LlavaConfig", vision_feature_layer=-1, image_seq_length=16),
        _prompt(16),
        _ONE_TEXT,
        _LONGER,
        options=_NO_CACHE,
    ),
    _entry(
        "vipllava",
        _llava(
            "VipLlavaForConditionalGeneration", "VipLlavaConfig", vision_feature_layers=[-1, -2], image_seq_length=16
        ),
        _prompt(16),
        _ONE_TEXT,
        _LONGER,
        options=_NO_CACHE,
    ),
    _entry("internvl", _internvl, _prompt(4), _ONE_TEXT, _LONGER, options=_NO_CACHE),
    _entry("paligemma", _paligemma, _prompt(16, types=True), _MARKED, _LONGER, options=_NO_CACHE),
    _entry("smolvlm", _smolvlm, _prompt(4, shape=(1, 1, 3, 32, 32)), _ONE_TEXT, _LONGER, options=_NO_CACHE),
    _entry(
        "smolvlm_vision",
        _smolvlm_vision,
        lambda sizes: {"pixel_values": _pictures(sizes)},
        {"pixel_values": {0: "B"}},
        [{"B": 2}, {"B": 1}, {"B": 3}],
        ("last_hidden_state",),
    ),
    _entry("gemma3", _gemma3, _prompt(4, types=True), _MARKED, _LONGER, options=_NO_CACHE),
    _entry(
        "qwen2_vl_text",
        _qwen2_vl,
        lambda sizes: {"input_ids": token_ids(1, sizes["S"], 250)},
        _ONE_TEXT,
        _LONGER,
        options=_NO_CACHE,
    ),
    _entry("git", _git, _text_and_picture, _BOTH, _BATCHED, options=_NO_CACHE),
    _entry("blip", _blip, _text_and_picture, _BOTH, _BATCHED),
    _entry(
        "trocr",
        _trocr,
        lambda sizes: {"pixel_values": _pictures(sizes), "decoder_input_ids": token_ids(sizes["B"], sizes["T"])},
        {"pixel_values": {0: "B"}, "decoder_input_ids": DECODED},
        [{"B": 2, "T": 7}, {"B": 1, "T": 4}, {"B": 3, "T": 11}],
        options=_NO_CACHE,
    ),
    _entry("vilt", _vilt, _text_and_picture, _BOTH, _BATCHED),
    _entry(
        "layoutlmv3",
        _layoutlmv3,
        lambda sizes: {
            "input_ids": token_ids(sizes["B"], sizes["S"]),
            "bbox": _boxes(sizes),
            "pixel_values": _pictures(sizes),
        },
        {"input_ids": _IDS, "bbox": _IDS, "pixel_values": {0: "B"}},
        _BATCHED,
    ),
    _entry(
        "clap_audio",
        _clap_audio,
        lambda sizes: {"input_features": pictures(sizes["B"], 1, 256, 16)},
        {"input_features": {0: "B"}},
        [{"B": 2}, {"B": 1}, {"B": 3}],
        ("audio_embeds",),
    ),
)
