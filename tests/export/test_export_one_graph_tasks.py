"""Models of images and sounds that answer in one call: their task, inputs and outputs in the manifest, and checked."""

import models
import pipeline_models
import pytest
import transformers as hf

from t2n_hf import export_nnef
from t2n_hf.store.manifest import ExportManifest


def ctc():
    options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    front = {"conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32}
    return hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config(**options, **front, **places)


def clip():
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tokens = {"vocab_size": 256, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = hf.CLIPConfig(text_config={**text, **tokens}, vision_config=pipeline_models.IMAGE, projection_dim=32)
    return hf.CLIPModel, config


def exported(made, folder):
    report = export_nnef(models.build(*made), folder)
    assert report.check == "passed"
    manifest = ExportManifest.read(folder)
    shapes = {value["name"]: value["shape"] for value in (*manifest.inputs, *manifest.outputs)}
    return manifest.task, shapes


def test_an_image_classifier_takes_any_number_of_images(tmp_path):
    vit = (hf.ViTForImageClassification, hf.ViTConfig(**pipeline_models.IMAGE))
    task, shapes = exported(vit, tmp_path / "out")
    assert task == "image-classification"
    assert shapes == {"pixel_values": ["B", 3, 32, 32], "logits": ["B", 2]}


@pytest.mark.slow
def test_speech_is_recognised_at_any_length(tmp_path):
    task, shapes = exported(ctc(), tmp_path / "out")
    assert task == "automatic-speech-recognition"
    assert shapes["input_values"] == ["B", "N"]
    assert shapes["logits"][0::2] == ["B", 32]


@pytest.mark.slow
def test_texts_and_images_are_compared_in_any_numbers(tmp_path):
    task, shapes = exported(clip(), tmp_path / "out")
    assert task == "zero-shot-image-classification"
    assert shapes["logits_per_image"] == ["I", "B"]
    assert {"input_ids", "attention_mask", "pixel_values", "text_embeds", "image_embeds"} <= set(shapes)
