"""Image models: pictures or films in, classes or features out, at any number of pictures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from zoo.entry import Entry, PlainModule, built, config_of

__all__ = ["FOUR_STAGES", "MODELS", "VIT", "pictures", "seer"]

VIT: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
_DINO: Final = {**{key: value for key, value in VIT.items() if key != "intermediate_size"}, "mlp_ratio": 2}
_SWIN: Final = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
FOUR_STAGES: Final = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 64, 64]}


def pictures(batch: int, *shape: int) -> torch.Tensor:
    """Noise, [batch, *shape] f32."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def seer(
    name: str,
    model: str,
    config: str,
    *,
    size: int = 32,
    outputs: Sequence[str] = ("logits",),
    parts: Callable[[], Mapping[str, Any]] = dict,
    called: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    drawn: int | None = None,
    **options: Any,
) -> Entry:
    """Entry of a model of `pixel_values`, `size` squared if no `shape` is given; `parts` makes configurations.

    `drawn` is the number of patches of a model that shuffles them: it is given the `noise` that it would draw.
    """
    picture = tuple(shape or (3, size, size))

    shapes = {"pixel_values": picture, **({"noise": (drawn,)} if drawn is not None else {})}

    def make() -> PlainModule:
        return PlainModule(
            model=built(model, config_of(config, {**options, **parts()})),
            inputs=lambda sizes: {name: pictures(sizes["B"], *shape) for name, shape in shapes.items()},
            axes={name: {0: "B"} for name in shapes},
            traced={"B": 2},
            tested=[{"B": 1}, {"B": 3}],
            outputs=outputs,
            options=called or {},
        )

    return Entry(name=name, family="vision", make=make)


_HIDDEN: Final = ("last_hidden_state",)

MODELS: Final = (
    seer("vit", "ViTForImageClassification", "ViTConfig", **VIT),
    seer("deit", "DeiTForImageClassification", "DeiTConfig", **VIT),
    seer("beit", "BeitForImageClassification", "BeitConfig", **VIT, use_relative_position_bias=True),
    seer(
        "data2vec_vision",
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        **VIT,
        use_relative_position_bias=True,
    ),
    seer("vit_msn", "ViTMSNForImageClassification", "ViTMSNConfig", **VIT),
    seer("vit_mae", "ViTMAEModel", "ViTMAEConfig", outputs=_HIDDEN, drawn=16, **VIT, mask_ratio=0.0),
    seer("ijepa", "IJepaForImageClassification", "IJepaConfig", **VIT),
    seer("dinov2", "Dinov2ForImageClassification", "Dinov2Config", **_DINO),
    seer("dinov2_interpolated", "Dinov2Model", "Dinov2Config", outputs=_HIDDEN, size=48, **_DINO),
    seer(
        "dinov2_registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        outputs=_HIDDEN,
        **_DINO,
        num_register_tokens=2,
    ),
    seer("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTConfig", outputs=_HIDDEN, **VIT, num_register_tokens=2),
    seer("dinov3_convnext", "DINOv3ConvNextModel", "DINOv3ConvNextConfig", outputs=_HIDDEN, size=64, **FOUR_STAGES),
    seer("swin", "SwinForImageClassification", "SwinConfig", **_SWIN),
    seer("swinv2", "Swinv2ForImageClassification", "Swinv2Config", **_SWIN),
    seer("donut_swin", "DonutSwinModel", "DonutSwinConfig", outputs=_HIDDEN, **_SWIN),
    seer("convnext", "ConvNextForImageClassification", "ConvNextConfig", size=64, **FOUR_STAGES),
    seer("convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config", size=64, **FOUR_STAGES),
    seer(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        size=64,
        **FOUR_STAGES,
        embedding_size=32,
        layer_type="bottleneck",
    ),
    seer(
        "regnet",
        "RegNetForImageClassification",
        "RegNetConfig",
        size=64,
        **FOUR_STAGES,
        embedding_size=32,
        groups_width=16,
    ),
    seer("bit", "BitForImageClassification", "BitConfig", size=64, **FOUR_STAGES, embedding_size=32, num_groups=4),
    seer(
        "hgnet_v2",
        "HGNetV2ForImageClassification",
        "HGNetV2Config",
        size=64,
        **FOUR_STAGES,
        embedding_size=32,
        stem_channels=[3, 16, 32],
        stage_in_channels=[32, 32, 32, 64],
        stage_mid_channels=[16, 16, 16, 16],
        stage_out_channels=[32, 32, 64, 64],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
    ),
    seer(
        "mobilenet_v1",
        "MobileNetV1ForImageClassification",
        "MobileNetV1Config",
        size=64,
        image_size=64,
        depth_multiplier=0.25,
    ),
    seer(
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        size=64,
        image_size=64,
        depth_multiplier=0.25,
    ),
    seer(
        "mobilevit",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        size=64,
        image_size=64,
        hidden_sizes=[32, 32, 64],
        neck_hidden_sizes=[16, 16, 32, 32, 32, 32, 64],
        num_attention_heads=4,
    ),
    seer(
        "mobilevitv2",
        "MobileViTV2ForImageClassification",
        "MobileViTV2Config",
        size=64,
        image_size=64,
        width_multiplier=0.25,
    ),
    seer(
        "efficientnet",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        size=64,
        image_size=64,
        width_coefficient=0.25,
        depth_coefficient=0.2,
        hidden_dim=320,
    ),
    seer(
        "levit",
        "LevitForImageClassification",
        "LevitConfig",
        size=64,
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        mlp_ratio=[2, 2, 2],
        attention_ratio=[2, 2, 2],
    ),
    seer(
        "cvt",
        "CvtForImageClassification",
        "CvtConfig",
        size=64,
        embed_dim=[16, 32, 48],
        num_heads=[1, 2, 3],
        depth=[1, 2, 3],
    ),
    seer(
        "pvt",
        "PvtForImageClassification",
        "PvtConfig",
        size=64,
        image_size=64,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64],
        num_attention_heads=[1, 2, 2, 4],
    ),
    seer(
        "pvt_v2",
        "PvtV2ForImageClassification",
        "PvtV2Config",
        size=64,
        image_size=64,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64],
        num_attention_heads=[1, 2, 2, 4],
    ),
    seer("poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", size=64, **FOUR_STAGES),
    seer(
        "focalnet",
        "FocalNetForImageClassification",
        "FocalNetConfig",
        size=64,
        image_size=64,
        embed_dim=32,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    seer(
        "swiftformer",
        "SwiftFormerForImageClassification",
        "SwiftFormerConfig",
        size=64,
        depths=[1, 1, 1, 1],
        embed_dims=[16, 32, 32, 64],
    ),
    seer(
        "textnet",
        "TextNetForImageClassification",
        "TextNetConfig",
        size=64,
        image_size=[64, 64],
        hidden_sizes=[16, 16, 32, 32, 32],
        stem_out_channels=16,
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 3]], [[3, 1]], [[1, 3]]],
        conv_layer_strides=[[1], [2], [2], [2]],
    ),
    seer(
        "hiera",
        "HieraForImageClassification",
        "HieraConfig",
        size=64,
        embed_dim=16,
        image_size=[64, 64],
        depths=[1, 1, 1],
        num_heads=[1, 2, 4],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=2,
        patch_size=[7, 7],
        patch_stride=[4, 4],
    ),
    seer(
        "perceiver",
        "PerceiverForImageClassificationLearned",
        "PerceiverConfig",
        size=32,
        image_size=32,
        num_latents=8,
        d_latents=32,
        d_model=64,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    ),
    seer(
        "clip_vision",
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        outputs=("image_embeds",),
        **VIT,
        projection_dim=32,
    ),
    seer("siglip_vision", "SiglipVisionModel", "SiglipVisionConfig", outputs=("pooler_output",), **VIT),
    seer("aimv2_vision", "Aimv2VisionModel", "Aimv2VisionConfig", outputs=_HIDDEN, **VIT),
    seer(
        "sam_vision",
        "SamVisionModel",
        "SamVisionConfig",
        outputs=_HIDDEN,
        size=64,
        hidden_size=32,
        output_channels=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=64,
        num_pos_feats=8,
    ),
    seer(
        "videomae",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        shape=(4, 3, 32, 32),
        **VIT,
        num_frames=4,
        tubelet_size=2,
    ),
    seer(
        "timesformer",
        "TimesformerForVideoClassification",
        "TimesformerConfig",
        shape=(4, 3, 32, 32),
        **VIT,
        num_frames=4,
    ),
    seer(
        "vivit",
        "VivitForVideoClassification",
        "VivitConfig",
        shape=(4, 3, 32, 32),
        **{**VIT, "patch_size": None},
        num_frames=4,
        tubelet_size=[2, 8, 8],
    ),
)
