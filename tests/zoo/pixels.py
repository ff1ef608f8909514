"""Image models with a result for each pixel: segmentation, depth, key points, higher resolution."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import transformers

from zoo.vision import FOUR_STAGES, VIT, seer

__all__ = ["MODELS"]

_NECK: Final = {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16}
_DEPTH: Final = ("predicted_depth",)


def _dinov2_parts(**options: Any) -> Callable[[], Mapping[str, Any]]:
    stages = [f"stage{number}" for number in range(1, 5)]
    return lambda: {
        "backbone_config": transformers.Dinov2Config(
            image_size=56,
            patch_size=14,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            out_features=stages,
            reshape_hidden_states=False,
            apply_layernorm=True,
            **options,
        )
    }


MODELS: Final = (
    seer(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        size=64,
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
    ),
    seer(
        "beit_segmentation",
        "BeitForSemanticSegmentation",
        "BeitConfig",
        **{**VIT, "num_hidden_layers": 4},
        out_indices=[1, 2, 3, 4],
        pool_scales=[1, 2],
        use_auxiliary_head=False,
    ),
    seer(
        "mobilevit_segmentation",
        "MobileViTForSemanticSegmentation",
        "MobileViTConfig",
        size=64,
        image_size=64,
        hidden_sizes=[32, 32, 64],
        neck_hidden_sizes=[16, 16, 32, 32, 32, 32, 64],
        num_attention_heads=4,
        aspp_out_channels=16,
    ),
    seer(
        "upernet",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        size=64,
        parts=lambda: {
            "backbone_config": transformers.ConvNextConfig(
                **FOUR_STAGES, out_features=["stage1", "stage2", "stage3", "stage4"]
            )
        },
        hidden_size=32,
        use_auxiliary_head=False,
    ),
    seer(
        "dpt",
        "DPTForDepthEstimation",
        "DPTConfig",
        outputs=_DEPTH,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        **_NECK,
        is_hybrid=False,
    ),
    seer(
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        "DepthAnythingConfig",
        outputs=_DEPTH,
        size=56,
        parts=_dinov2_parts(),
        reassemble_hidden_size=32,
        **_NECK,
        head_in_index=-1,
        head_hidden_size=8,
    ),
    seer(
        "glpn",
        "GLPNForDepthEstimation",
        "GLPNConfig",
        outputs=_DEPTH,
        size=64,
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    seer(
        "vitpose",
        "VitPoseForPoseEstimation",
        "VitPoseConfig",
        outputs=("heatmaps",),
        shape=(3, 32, 32),
        parts=lambda: {
            "backbone_config": transformers.VitPoseBackboneConfig(
                **{**VIT, "intermediate_size": None, "image_size": [32, 32], "patch_size": [8, 8]},
                mlp_ratio=2,
                out_features=["stage2"],
            )
        },
    ),
    seer(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        outputs=("reconstruction",),
        image_size=32,
        embed_dim=32,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
        upsampler="pixelshuffle",
    ),
)
