"""Tiny random language models that read images, and what their processors would give them.

Token 255 stands for a feature of an image; weights are scaled up, so that masks and positions matter.
"""

from collections.abc import Sequence
from typing import Any

import models
import torch
import transformers as hf
from pipeline_models import IMAGE, llava

PLACEHOLDER = 255
_TOKEN = {"image_token_id": PLACEHOLDER}
_TOKENS = {**_TOKEN, "image_token_index": PLACEHOLDER}
_TEXT = {**models.SHAPE, "head_dim": 16}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_LLAMA = {"model_type": "llama", **models.SHAPE}
# What each of these takes for pictures of 32 by 32: features of one, and how the picture is given.
SIZES = {
    "llava": 16,
    "vipllava": 16,
    "internvl": 4,
    "aya_vision": 4,
    "cohere2_vision": 4,
    "got_ocr2": 4,
    "deepseek_vl": 16,
    "janus": 16,
    "aria": 4,
    "smolvlm": 4,
    "idefics3": 4,
    "idefics2": 4,
    "gemma3": 4,
    "paligemma": 16,
    "paligemma2": 16,
    "voxtral": 10,
}
TILED = ("smolvlm", "idefics3", "idefics2")
# Pixels of a side of what one feature stands for, in models that take pictures of any size.
SQUARES = {"mistral3": 16, "lighton_ocr": 16, "pixtral": 8}
GRIDS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
)


def _qwen(name: str, vision: dict[str, Any], text: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    marks = {**_TOKEN, "video_token_id": 254, "vision_start_token_id": 253, "vision_end_token_id": 252}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
    config = getattr(hf, f"{name}Config")(
        text_config={**models.SHAPE, "rope_parameters": {**rope, **text.pop("rope", {})}, **text},
        vision_config={**patches, **vision},
        **marks,
    )
    return models.build(getattr(hf, f"{name}ForConditionalGeneration"), config)


def qwen2_vl() -> Any:
    """Qwen2-VL: positions in three directions."""
    return _qwen("Qwen2VL", {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {})


def qwen2_5_vl() -> Any:
    """Qwen2.5-VL: two of three layers attend in windows of 2 by 2 features."""
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    sizes = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64}
    return _qwen("Qwen2_5_VL", {**sizes, **windows}, {})


_DEEP = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}


def qwen3_vl() -> Any:
    """Qwen3-VL: features for inner layers, interpolated positions."""
    return _qwen("Qwen3VL", dict(_DEEP), {"head_dim": 16, "rope": {"mrope_interleaved": True}})


def qwen3_vl_moe() -> Any:
    """Qwen3-VL with experts."""
    text = {"head_dim": 16, "rope": {"mrope_interleaved": True}, **models.EXPERTS}
    return _qwen("Qwen3VLMoe", dict(_DEEP), text)


def qwen3_5(name: str = "Qwen3_5", **more: Any) -> Any:
    """Qwen3.5: layers of linear attention keep states."""
    vision = {name: value for name, value in _DEEP.items() if name != "deepstack_visual_indexes"}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    rope = {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return _qwen(name, vision, {"head_dim": 16, "rope": rope, **linear, **more})


def qwen3_5_moe() -> Any:
    """Qwen3.5 with experts."""
    return qwen3_5("Qwen3_5Moe", **models.EXPERTS, shared_expert_intermediate_size=32)


def glm4v(name: str = "Glm4v", **more: Any) -> Any:
    """GLM-4V: positions interpolated by cubes, features by a convolution."""
    sizes = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 96, "image_size": 16}
    return _qwen(name, sizes, {"rope": {"mrope_section": [2, 3, 3], **more.pop("rope", {})}, **more})


def glm_ocr() -> Any:
    """GLM-OCR: GLM-4V without learned positions."""
    return glm4v("GlmOcr", head_dim=16)


def glm4v_moe() -> Any:
    """GLM-4.5V: experts."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    half = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    return glm4v("Glm4vMoe", **experts, n_group=1, topk_group=1, n_shared_experts=1, head_dim=16, rope=half)


def gemma3() -> Any:
    """Gemma 3: tokens of an image see each other, in a window of 6 too."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**_TEXT, "num_hidden_layers": 3, "query_pre_attn_scalar": 16, "sliding_window": 6, "layer_types": kinds}
    config = hf.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **IMAGE},
        text_config={"model_type": "gemma3_text", **text},
        mm_tokens_per_image=4,
        **_TOKENS,
    )
    return models.build(hf.Gemma3ForConditionalGeneration, config)


def _paligemma(text: Any) -> Any:
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**IMAGE, projection_dim=64),
        text_config=text,
        projection_dim=64,
        hidden_size=64,
        **_TOKENS,
    )
    config.text_config.num_image_tokens = 16
    return models.build(hf.PaliGemmaForConditionalGeneration, config)


def paligemma() -> Any:
    """PaliGemma: the prompt sees all of itself."""
    return _paligemma(hf.GemmaConfig(**_TEXT))


def paligemma2() -> Any:
    """PaliGemma 2: windows beside."""
    return _paligemma(hf.Gemma2Config(**_TEXT, **_WINDOWS, query_pre_attn_scalar=16))


def _built(name: str, **options: Any) -> Any:
    config = getattr(hf, f"{name}Config")(**options)
    return models.build(getattr(hf, f"{name}ForConditionalGeneration"), config)


def vipllava() -> Any:
    """ViP-LLaVA: features of several layers."""
    parts = {"vision_config": hf.CLIPVisionConfig(**IMAGE), "text_config": hf.LlamaConfig(**models.SHAPE)}
    return _built("VipLlava", **parts, **_TOKENS, vision_feature_layers=[-1, -2], image_seq_length=16)


def internvl() -> Any:
    """InternVL: four patches a feature."""
    vision = hf.InternVLVisionConfig(**{**IMAGE, "image_size": [32, 32], "patch_size": [8, 8]})
    text = hf.Qwen2Config(**models.SHAPE)
    return _built(
        "InternVL", vision_config=vision, text_config=text, downsample_ratio=0.5, image_seq_length=4, **_TOKEN
    )


def aya_vision() -> Any:
    """Aya Vision: windows in the decoder."""
    parts = {
        "vision_config": hf.SiglipVisionConfig(**IMAGE),
        "text_config": hf.Cohere2Config(**models.SHAPE, **_WINDOWS),
    }
    return _built("AyaVision", **parts, **_TOKENS, downsample_factor=2, adapter_layer_norm_eps=1e-5)


def cohere2_vision() -> Any:
    """Command A Vision."""
    parts = {
        "vision_config": hf.SiglipVisionConfig(**IMAGE),
        "text_config": hf.Cohere2Config(**models.SHAPE, **_WINDOWS),
    }
    return _built("Cohere2Vision", **parts, **_TOKEN, downsample_factor=2, alignment_intermediate_size=128)


def got_ocr2() -> Any:
    """GOT-OCR2: a vision encoder of SAM, with windows."""
    sizes = {"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    places = {"image_size": 64, "patch_size": 8, "mlp_dim": 128, "window_size": 4, "global_attn_indexes": [1]}
    vision = hf.GotOcr2VisionConfig(**sizes, **places)
    return _built(
        "GotOcr2", vision_config=vision, text_config=hf.Qwen2Config(**models.SHAPE), image_seq_length=4, **_TOKENS
    )


def deepseek_vl() -> Any:
    """DeepSeek-VL."""
    return _built("DeepseekVL", vision_config=dict(IMAGE), text_config=dict(_LLAMA), **_TOKEN)


def janus() -> Any:
    """Janus, as it reads."""
    paints = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1}
    sizes = {"channel_multiplier": [1, 1], "projection_dim": 8, "image_token_embed_dim": 64, "num_patches": 4}
    vision = {**IMAGE, "projection_dim": 64, "mlp_ratio": 2.0}
    return _built(
        "Janus",
        vision_config=vision,
        text_config=dict(_LLAMA),
        vq_config={**paints, **sizes, "double_latent": False, "initializer_range": 0.02},
        **_TOKEN,
    )


def aria() -> Any:
    """Aria: queries gather the patches; experts."""
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 64}
    return _built(
        "Aria",
        vision_config={"model_type": "idefics3_vision", **IMAGE},
        text_config={**models.SHAPE, **experts},
        projector_patch_to_query_dict={16: 4},
        **_TOKENS,
    )


def smolvlm() -> Any:
    """SmolVLM: pictures in tiles."""
    return _built("SmolVLM", vision_config=dict(IMAGE), text_config=dict(_LLAMA), scale_factor=2, **_TOKEN)


def idefics3() -> Any:
    """Idefics3: pictures in tiles."""
    return _built("Idefics3", vision_config=dict(IMAGE), text_config=dict(_LLAMA), scale_factor=2, **_TOKEN)


def idefics2() -> Any:
    """Idefics2: latents gather the patches."""
    heads = {"resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2}
    perceiver = {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, **heads}
    text = {"model_type": "mistral", **models.SHAPE}
    return _built("Idefics2", vision_config=dict(IMAGE), text_config=text, perceiver_config=perceiver, **_TOKEN)


def _pixtral() -> dict[str, Any]:
    vision = hf.PixtralVisionConfig(**IMAGE, head_dim=16)
    return {"vision_config": vision, "text_config": hf.MistralConfig(**_TEXT, sliding_window=None)}


def mistral3() -> Any:
    """Mistral 3: pictures of any size, four patches a feature."""
    return _built("Mistral3", **_pixtral(), **_TOKENS, spatial_merge_size=2)


def pixtral() -> Any:
    """Pixtral: pictures of any size."""
    return _built("Llava", **_pixtral(), **_TOKENS, vision_feature_layer=-1, vision_feature_select_strategy="full")


def lighton_ocr() -> Any:
    """LightOnOCR: pictures of any size before a Qwen3."""
    vision = {"model_type": "pixtral", **IMAGE, "head_dim": 16}
    return _built(
        "LightOnOcr", vision_config=vision, text_config={"model_type": "qwen3", **_TEXT}, spatial_merge_size=2, **_TOKEN
    )


def ovis2() -> Any:
    """Ovis2: embeddings of its own around each image."""
    vision = hf.Ovis2VisionConfig(**IMAGE, vocab_size=64, num_visual_indicator_tokens=5, hidden_stride=2)
    text = {"model_type": "qwen2", **models.SHAPE}
    places = {"visual_indicator_token_ids": [240, 241, 242, 243, 244]}
    return _built("Ovis2", vision_config=vision, text_config=text, hidden_size=64, vocab_size=256, **_TOKEN, **places)


def voxtral() -> Any:
    """Voxtral: sounds of one length."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
    audio = {**sizes, **heads, "num_mel_bins": 16, "max_source_positions": 40}
    return _built("Voxtral", audio_config=audio, text_config=dict(_LLAMA), hidden_size=64, audio_token_id=PLACEHOLDER)


MODELS = {
    make.__name__: make
    for make in (
        llava,
        vipllava,
        internvl,
        aya_vision,
        cohere2_vision,
        got_ocr2,
        deepseek_vl,
        janus,
        aria,
        smolvlm,
        idefics3,
        idefics2,
        gemma3,
        paligemma,
        paligemma2,
        mistral3,
        lighton_ocr,
        pixtral,
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        qwen3_vl_moe,
        qwen3_5,
        qwen3_5_moe,
        glm4v,
        glm4v_moe,
        glm_ocr,
        voxtral,
    )
}


def asked(name: str, model: Any, grids: Sequence[tuple[int, int]], seed: int = 1) -> dict[str, torch.Tensor]:
    """A prompt about pictures of these heights and widths in features; models of one size take as many of theirs."""
    generator = torch.Generator().manual_seed(seed)
    counts = [height * width if name not in SIZES else SIZES[name] for height, width in grids]
    tokens = [1, 5]
    for count in counts:
        tokens += [253, *[PLACEHOLDER] * count, 252, 7]
    ids = torch.tensor([[*tokens, 9, 11]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_image = (ids == PLACEHOLDER).long()
    if name == "gemma3":
        given["token_type_ids"] = is_image
    if name.startswith("paligemma"):
        given["token_type_ids"] = torch.zeros_like(ids)
    if not grids:
        return given
    return {
        **given,
        **_pictures(name, model, grids, generator),
        **({"mm_token_type_ids": is_image} if name in GRIDS else {}),
    }


def _pictures(
    name: str, model: Any, grids: Sequence[tuple[int, int]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    if name in GRIDS:
        values = model.model.visual.patch_embed.proj.weight[0].numel()
        sizes = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids])
        patches = int(sizes.prod(-1).sum())
        return {"pixel_values": torch.randn(patches, values, generator=generator), "image_grid_thw": sizes}
    if name in SQUARES:
        sizes = torch.tensor(grids) * SQUARES[name]
        high, wide = sizes.amax(0).tolist()
        return {"pixel_values": torch.randn(len(grids), 3, high, wide, generator=generator), "image_sizes": sizes}
    if name == "voxtral":
        return {"input_features": torch.randn(len(grids), 16, 80, generator=generator)}
    side = 64 if name == "got_ocr2" else 32
    pictures = torch.randn(len(grids), 3, side, side, generator=generator)
    # Processors fill up tiles with zeros, which mean nothing.
    tiles = torch.cat([pictures, torch.zeros(1, 3, side, side)])[None]
    return {"pixel_values": tiles if name in TILED else pictures}
