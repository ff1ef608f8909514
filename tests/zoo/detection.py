"""Object detection and universal segmentation: queries that look at feature maps."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import transformers

from zoo.vision import VIT, seer

__all__ = ["MODELS"]

_DETR: Final = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 10,
}
_RT_DETR: Final = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 32, 32],
    "feat_strides": [8, 16, 32],
    "encoder_layers": 1,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 2,
    "d_model": 32,
    "num_queries": 10,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 64,
    "num_feature_levels": 3,
    "decoder_n_points": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "num_denoising": 0,
}
_BOXES: Final = {"outputs": ("logits", "pred_boxes"), "size": 64}
_MASKS: Final = {"outputs": ("class_queries_logits", "masks_queries_logits"), "size": 64}
_NO_TIMM: Final = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
_STAGES: Final = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}


def _resnet(*stages: int) -> Callable[[], Mapping[str, Any]]:
    names = [f"stage{number}" for number in stages]
    return lambda: {"backbone_config": transformers.ResNetConfig(**_STAGES, out_features=names), **_NO_TIMM}


def _rt_resnet() -> Mapping[str, Any]:
    names = ["stage2", "stage3", "stage4"]
    return {
        "backbone_config": transformers.RTDetrResNetConfig(**_STAGES, layer_type="basic", out_features=names),
        **_NO_TIMM,
    }


def _swin(size: int = 64) -> Mapping[str, Any]:
    stages = [f"stage{number}" for number in range(1, 5)]
    return {
        "backbone_config": transformers.SwinConfig(
            image_size=size,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[1, 2, 4, 4],
            window_size=4,
            out_features=stages,
        )
    }


def _maskformer() -> Mapping[str, Any]:
    decoder = transformers.DetrConfig(**_DETR, **_resnet(4)())
    return {**_swin(), "decoder_config": decoder}


MODELS: Final = (
    seer(
        "yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        outputs=("logits", "pred_boxes"),
        **{**VIT, "image_size": [32, 32]},
        num_detection_tokens=5,
    ),
    seer("detr", "DetrForObjectDetection", "DetrConfig", parts=_resnet(4), **_DETR, **_BOXES),
    seer(
        "table_transformer",
        "TableTransformerForObjectDetection",
        "TableTransformerConfig",
        parts=_resnet(4),
        **_DETR,
        **_BOXES,
    ),
    seer(
        "conditional_detr",
        "ConditionalDetrForObjectDetection",
        "ConditionalDetrConfig",
        parts=_resnet(4),
        **_DETR,
        **_BOXES,
    ),
    seer(
        "dab_detr",
        "DabDetrForObjectDetection",
        "DabDetrConfig",
        parts=_resnet(4),
        **{**_DETR, "d_model": None},
        hidden_size=32,
        **_BOXES,
    ),
    seer(
        "deformable_detr",
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        parts=_resnet(2, 3, 4),
        **{**_DETR, "encoder_layers": 2, "decoder_layers": 2},
        num_feature_levels=4,
        **{**_BOXES, "size": 128},
    ),
    seer("rt_detr", "RTDetrForObjectDetection", "RTDetrConfig", parts=_rt_resnet, **_RT_DETR, **_BOXES),
    seer("rt_detr_v2", "RTDetrV2ForObjectDetection", "RTDetrV2Config", parts=_rt_resnet, **_RT_DETR, **_BOXES),
    seer(
        "mask2former",
        "Mask2FormerForUniversalSegmentation",
        "Mask2FormerConfig",
        parts=_swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=5,
        **_MASKS,
    ),
    seer(
        "maskformer",
        "MaskFormerForInstanceSegmentation",
        "MaskFormerConfig",
        parts=_maskformer,
        fpn_feature_size=32,
        mask_feature_size=32,
        **_MASKS,
    ),
)
