"""Models of several graphs: exported, checked, and generating in tract what PyTorch generates."""

import json

import multimodal_models
import numpy as np
import pipeline_models
import pytest
import torch
from transformers import GenerationMixin

from t2n_hf import export_nnef
from t2n_hf.errors import ArchiveError, CheckError, ConfigError, FormatError
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tract.encoder_decoder import EncoderDecoder
from t2n_hf.tract.image_text import TractModelForImageTextToText
from t2n_hf.tract.model import TractModelForCausalLM
from t2n_hf.tract.runner import TractRunner
from t2n_hf.tract.seq2seq import TractModelForSeq2SeqLM

ENCODER_DECODERS = ("t5", "bart", "marian", "whisper", "trocr", "moonshine", "speech_to_text", "pp_formulanet")
MODES = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


def generated(model, inputs, **options):
    # Whisper's own generate() is about minutes of sound; the common one is what an archive has.
    return GenerationMixin.generate(model, **inputs, max_new_tokens=8, min_new_tokens=8, **options)


def check_generation(name, folder):
    model = getattr(pipeline_models, name)()
    report = export_nnef(model, folder)
    assert report.check == "passed"
    assert set(report.archives) == {"encoder", "decoder"}
    inputs = pipeline_models.inputs_for(model)
    with TractModelForSeq2SeqLM.from_pretrained(folder) as loaded:
        for options in MODES.values():
            expected = generated(model, inputs, **options)
            torch.testing.assert_close(generated(loaded, inputs, **options), expected)
    return model


def test_t5_generates_in_tract_what_pytorch_does_with_padding_batches_and_beams(tmp_path):
    model = check_generation("t5", tmp_path / "out")
    manifest = ExportManifest.read(tmp_path / "out")
    manifest.verify(tmp_path / "out")
    assert manifest.task == "text2text-generation"
    assert manifest.archives == {"encoder": "encoder.nnef.tgz", "decoder": "decoder.nnef.tgz"}
    encoder, decoder = manifest.parts
    given = {value["name"] for value in encoder["outputs"]}
    taken = {value["name"] for value in decoder["inputs"] if value["name"].startswith("cross_")}
    assert taken == given - {"last_hidden_state"}
    with pytest.raises(ConfigError, match="TractModelForSeq2SeqLM"):
        TractModelForCausalLM.from_pretrained(tmp_path / "out")

    # Each weight of cross-attention's keys and values is in the encoder's archive, and there only.
    labels = {name: set(ArchiveReader(tmp_path / "out" / path).labels()) for name, path in manifest.archives.items()}
    cross = {f"decoder.block.{i}.layer.1.EncDecAttention.{side}.weight" for i in range(2) for side in "kv"}
    assert cross <= labels["encoder"]
    assert not cross & labels["decoder"]
    assert "decoder.block.0.layer.1.EncDecAttention.q.weight" not in labels["encoder"]

    # The encoder alone, on other sizes than were traced.
    inputs = pipeline_models.inputs_for(model, batch=3, length=11, seed=4)
    with TractRunner(report_path(manifest, tmp_path / "out", "encoder")) as runner, torch.no_grad():
        got = runner.run({name: value.numpy() for name, value in inputs.items()})
        expected = model.get_encoder()(**inputs).last_hidden_state.numpy()
    np.testing.assert_allclose(got["last_hidden_state"], expected, atol=1e-4)


def report_path(manifest, folder, part):
    return folder / manifest.archives[part]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENCODER_DECODERS if name != "t5"])
def test_an_encoder_decoder_generates_in_tract_what_pytorch_does(name, tmp_path):
    check_generation(name, tmp_path / "out")


def test_llava_generates_in_tract_what_pytorch_does_with_any_number_of_images(tmp_path):
    model = pipeline_models.llava()
    report = export_nnef(model, tmp_path / "out")
    assert report.check == "passed"
    assert list(report.archives) == ["vision", "embedding", "decoder"]
    generator = torch.Generator().manual_seed(1)
    with TractModelForImageTextToText.from_pretrained(tmp_path / "out") as loaded:
        for images in (1, 2, 0):
            ids = torch.tensor([[1, 5, *([255] * 16 + [7]) * images, 9, 11]])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if images:
                inputs["pixel_values"] = torch.randn(images, 3, 32, 32, generator=generator)
            expected = generated(model, inputs, do_sample=False)
            torch.testing.assert_close(generated(loaded, inputs, do_sample=False), expected)
        with pytest.raises(ConfigError, match=r"16 placeholders.*for 0 features"):
            loaded(input_ids=torch.tensor([[1, *[255] * 16, 2]]))
        with pytest.raises(ConfigError, match=r"takes \[I, 3, 32, 32\]"):
            loaded(input_ids=torch.tensor([[1, *[255] * 16, 2]]), pixel_values=torch.zeros(1, 3, 16, 16))
        with pytest.raises(ConfigError, match="expected tokens from 0"):
            loaded(input_ids=torch.tensor([[1, 999]]))
        loaded.max_context = 8
        ids = torch.tensor([[1, 5, 9]])
        ended = loaded.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, min_new_tokens=6)
        assert ended.shape[1] == 9  # the last one is only predicted
        with pytest.raises(ConfigError, match="longer than the 8"):
            loaded(input_ids=torch.ones(1, 9, dtype=torch.int64))


def test_a_part_that_is_wrong_is_found_by_the_check_of_the_whole(tmp_path, monkeypatch):
    # Right parts, led wrongly: the decoder gets the encoder's output of another sentence.
    encode = EncoderDecoder.encode

    def swapped(self, inputs):
        return encode(self, {**inputs, "input_ids": inputs["input_ids"] // 2})

    monkeypatch.setattr(EncoderDecoder, "encode", swapped)
    with pytest.raises(CheckError, match="token 0 of the whole"):
        export_nnef(pipeline_models.t5(num_layers=1, num_decoder_layers=1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_several_graphs_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="embeddings of its own in the places of indicator tokens"):
        export_nnef(multimodal_models.ovis2(), tmp_path / "out")
    with pytest.raises(ConfigError, match="batch and mask are for text-generation"):
        export_nnef(pipeline_models.t5(), tmp_path / "out", batch=True)
    assert not (tmp_path / "out").exists()


def test_manifests_of_one_graph_are_as_they_were_and_of_several_are_of_another_version(tmp_path):
    single = ExportManifest(archive="model.nnef.tgz", dtype="f32", weights="none")
    assert json.loads(single.to_json())["schema_version"] == 1
    assert "parts" not in json.loads(single.to_json())
    part = {"inputs": [], "outputs": [], "symbols": []}
    parts = [
        {"name": "encoder", "archive": "encoder.nnef.tgz", **part},
        {"name": "decoder", "archive": "decoder.nnef.tgz", **part},
    ]
    several = ExportManifest(archive="decoder.nnef.tgz", dtype="f32", weights="none", parts=parts)
    assert json.loads(several.to_json())["schema_version"] == 2
    assert ExportManifest.from_json(several.to_json()).archives == several.archives
    with pytest.raises(ArchiveError, match=r"names the file '\.\./x'"):
        ExportManifest(archive="../x", dtype="f32", weights="none", parts=[{**parts[0], "archive": "../x"}, parts[1]])
    with pytest.raises(FormatError, match="different names"):
        ExportManifest(archive="decoder.nnef.tgz", dtype="f32", weights="none", parts=[parts[1], parts[1]])
