"""Models of many kinds by the task of their class alone, without examples: right in tract, or refused with a reason."""

import models
import pytest
import torch
import transformers as hf
from pipeline_models import IMAGE

from t2n_hf import export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks import pipeline_of

BERT = {key: value for key, value in models.SHAPE.items() if key != "num_key_value_heads"}


def eomt():
    """EoMT: decides by a buffer whether a layer has a mask."""
    sizes = {"num_blocks": 1, "image_size": 64, "num_queries": 5, "num_upscale_blocks": 1}
    return models.build(hf.EomtForUniversalSegmentation, hf.EomtConfig(**{**IMAGE, **sizes}))


def xlnet():
    """XLNet: cuts what it would remember at 512 tokens."""
    config = hf.XLNetConfig(vocab_size=256, d_model=64, n_layer=2, n_head=4, d_inner=128)
    return models.build(hf.XLNetModel, config)


def dpr():
    """DPR: gives a pooled output and nothing else."""
    return models.build(hf.DPRQuestionEncoder, hf.DPRConfig(**BERT))


def groupvit():
    """GroupViT: a text and a picture, by feature-extraction."""
    vision = {**IMAGE, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 4]}
    text = {**BERT, "hidden_size": 64, "max_position_embeddings": 32}
    config = hf.GroupViTConfig(
        vision_config=vision, text_config=text, projection_dim=16, projection_intermediate_dim=32
    )
    return models.build(hf.GroupViTModel, config)


def rf_detr():
    """RF-DETR: a backbone whose windows its own image size does not fill."""
    backbone = hf.RfDetrDinov2Config(
        **{**IMAGE, "num_hidden_layers": 3},
        num_windows=3,
        window_block_indexes=[0, 2],
        out_indices=[1, 3],
    )
    sizes = {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64, "num_queries": 5, "group_detr": 1}
    heads = {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4}
    config = hf.RfDetrConfig(backbone_config=backbone, **sizes, **heads)
    return models.build(hf.RfDetrForObjectDetection, config)


def speech_encoder_decoder(**changes):
    """A speech encoder before a text decoder: what it takes is named by the encoder."""
    front = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    speech = hf.Wav2Vec2Config(**BERT, **front, **places)
    config = hf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(speech, hf.BertConfig(**BERT))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    for name, value in changes.items():
        setattr(config.decoder, name, value)
    return models.build(hf.SpeechEncoderDecoderModel, config)


def speecht5():
    """SpeechT5: its configuration has its own name for the number of tokens."""
    front = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "max_text_positions": 64}
    sizes = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    return models.build(hf.SpeechT5ForSpeechToText, hf.SpeechT5Config(hidden_size=64, **front, **places, **sizes))


def clip_tower():
    """A tower of CLIP with its projection, which no auto class knows."""
    return models.build(hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig(**IMAGE, projection_dim=16))


def swin2sr():
    """Swin2SR: an image from an image."""
    sizes = {"image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
    config = hf.Swin2SRConfig(**sizes, window_size=4, upscale=2)
    return models.build(hf.Swin2SRForImageSuperResolution, config)


OUTPUTS = {
    eomt: ["class_queries_logits", "masks_queries_logits"],
    clip_tower: ["last_hidden_state", "image_embeds"],
    dpr: ["pooler_output"],
    swin2sr: ["reconstruction"],
    xlnet: ["last_hidden_state"],
    speech_encoder_decoder: None,
}
SLOW = {speecht5: None, groupvit: ["text_embeds", "image_embeds"], rf_detr: ["logits", "pred_boxes"]}


def check(make, outputs, folder):
    model = make()
    pipeline = pipeline_of(model)
    if outputs is not None:
        assert list(pipeline.main.output_names) == outputs
    assert export_nnef(model, folder).check == "passed"


@pytest.mark.tract
@pytest.mark.parametrize("make", OUTPUTS, ids=lambda make: make.__name__)
def test_a_model_is_right_by_its_task_alone(make, tmp_path):
    check(make, OUTPUTS[make], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.tract
@pytest.mark.parametrize("make", SLOW, ids=lambda make: make.__name__)
def test_a_larger_model_is_right_by_its_task_alone(make, tmp_path):
    check(make, SLOW[make], tmp_path / "out")


def test_a_buffer_that_decides_is_a_buffer_again():
    model = eomt()
    pipeline_of(model)
    assert isinstance(model.attn_mask_probs, torch.Tensor)
    assert "attn_mask_probs" not in vars(model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**IMAGE)), "takes pictures as patches, with a mask"),
        (
            lambda: speech_encoder_decoder(is_decoder=False, add_cross_attention=False),
            "attends to nothing of the encoder",
        ),
    ],
    ids=["patches with shapes", "no cross-attention"],
)
def test_what_no_task_describes_is_refused(model, said):
    with pytest.raises(ConfigError, match=said):
        pipeline_of(model())


def test_what_fails_while_it_is_described_says_where():
    class Odd(hf.ViTForImageClassification):
        @property
        def main_input_name(self):
            return {}["what"]

    with pytest.raises(ConfigError, match=r"Odd is not what image-classification knows: KeyError: 'what' \(at .*Name"):
        pipeline_of(Odd(hf.ViTConfig(**IMAGE)), task="image-classification")


def test_an_output_that_is_missing_is_named_with_those_that_are_there(tmp_path):
    class Nameless(hf.ViTForImageClassification):
        def forward(self, pixel_values, **options):
            return hf.modeling_outputs.BaseModelOutput(last_hidden_state=super().forward(pixel_values).logits)

    model = models.build(Nameless, hf.ViTConfig(**IMAGE))
    with pytest.raises(ConfigError, match="gives no logits; it gives last_hidden_state"):
        export_nnef(model, tmp_path / "out", task="image-classification")
