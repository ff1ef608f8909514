"""What quantize_checkpoint refuses, in words, and that it leaves nothing behind."""

import json
import os

import models
import pytest
import safetensors.torch
import torch
from quantize_cases import Halves, content, rewritten

from t2n_hf import T2NConfig, quantize_checkpoint
from t2n_hf.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    OutputExistsError,
    QuantizationError,
    StorageError,
    UnknownTagError,
)
from t2n_hf.store.checkpoint import CheckpointIndex

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.saved(models.m2(), tmp_path_factory.mktemp("checkpoint"))


def refused(error, match, source, folder, **options):
    before = sorted(os.listdir(folder))
    with pytest.raises(error, match=match):
        quantize_checkpoint(source, folder / "out", **options)
    assert sorted(os.listdir(folder)) == before


def with_one_value(name, value, model, folder):
    def change(tensors):
        tensors[name].view(-1)[5] = value

    return rewritten(models.saved(model, folder), change)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value, tmp_path):
    source = with_one_value(UP, value, models.m2(), tmp_path)
    refused(QuantizationError, UP.replace(".", r"\."), source, tmp_path)


def test_a_number_missing_in_an_expert_is_named(tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    source = with_one_value(name, float("nan"), models.m4(), tmp_path)
    refused(QuantizationError, r"model\.layers\.1\.mlp\.experts\.down_proj", source, tmp_path)


def test_a_weight_that_is_no_number_and_stays_float_is_passed_on(tmp_path):
    source = with_one_value("model.norm.weight", float("nan"), models.m2(), tmp_path)
    quantize_checkpoint(source, tmp_path / "out")
    assert torch.isnan(CheckpointIndex.open(tmp_path / "out")["model.norm.weight"].read()).any()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"weights": "none"}, ConfigError, "nothing to quantize"),
        ({"weights": "q9"}, UnknownTagError, "q9"),
        ({"config": T2NConfig(), "weights": "q4_0"}, ConfigError, "config= already says"),
        ({"config": {"weights": "q4_0"}}, ConfigError, "expected a T2NConfig"),
        ({"dtype": "int8"}, ConfigError, "no float type"),
        ({"dtype": "f99"}, ConfigError, "unknown dtype 'f99'"),
        ({"max_shard_size": "many"}, ConfigError, "max_shard_size='many'"),
        ({"max_shard_size": None}, ConfigError, "max_shard_size=None"),
        ({"importance": [1, 2]}, ConfigError, "expected tensors by parameter name"),
        ({"task": "nonsense"}, ConfigError, "nonsense"),
        ({"embeddings": "q4_0", "modules_to_not_convert": ["model.embed_tokens"]}, ConfigError, "remove one of them"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options, error, match, checkpoint, tmp_path):
    refused(error, match, checkpoint, tmp_path, **options)


def test_importance_for_another_model_is_refused(checkpoint, tmp_path):
    refused(ConfigError, f"{UP} has 64 input channels", checkpoint, tmp_path, importance={UP: torch.ones(3)})


def test_a_missing_file_of_importance_is_named(checkpoint, tmp_path):
    refused(CheckpointNotFoundError, "importance", checkpoint, tmp_path, importance=tmp_path / "importance")


def test_a_model_that_no_weight_of_fits_is_refused_with_the_reason(tmp_path):
    source = models.saved(models.m9(), tmp_path)
    refused(ConfigError, r"nothing of .* can be quantized to q4_0: its last axis has \d+ values", source, tmp_path)


def test_a_checkpoint_that_is_packed_already_is_refused(checkpoint, tmp_path):
    quantize_checkpoint(checkpoint, tmp_path / "packed")
    refused(ConfigError, "is quantized already", tmp_path / "packed", tmp_path)


def test_a_checkpoint_of_another_quantizer_is_refused(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    refused(ConfigError, "quantized with 'gptq'", source, tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(CheckpointNotFoundError, r"pytorch_model\.bin.*save_pretrained", source, tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(CheckpointNotFoundError, r"has no config\.json", tmp_path / "empty", tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    os.truncate(source / "model.safetensors", 100_000)
    refused(StorageError, "truncated", source, tmp_path)


def test_values_that_are_missing_are_named(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    rewritten(source, lambda tensors: {name: value for name, value in tensors.items() if name != UP})
    refused(FormatError, rf"holds no values for {UP}", source, tmp_path)


def test_the_model_itself_is_not_written_over(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    before = content(source)
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link"):
        with pytest.raises(OutputExistsError, match="the model itself"):
            quantize_checkpoint(source, out, overwrite=True)
    assert content(source) == before


def test_what_is_there_stays_unless_it_is_an_older_output(checkpoint, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    refused(OutputExistsError, "exists already", checkpoint, tmp_path)
    (out / "thesis.txt").write_text("years of work")
    refused(OutputExistsError, "not an older output", checkpoint, tmp_path, overwrite=True)
    (out / "thesis.txt").unlink()
    quantize_checkpoint(checkpoint, out, overwrite=True)
    (out / "thesis.txt").write_text("years of work")
    refused(OutputExistsError, r"holds thesis\.txt", checkpoint, tmp_path, overwrite=True)
    assert (out / "thesis.txt").exists()


def test_a_plain_model_is_not_replaced(checkpoint, tmp_path):
    models.m2().save_pretrained(tmp_path / "out")
    refused(OutputExistsError, "not an older output", checkpoint, tmp_path, overwrite=True)


def test_a_folder_whose_files_are_read_through_links_is_not_replaced(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    quantize_checkpoint(source, tmp_path / "out")
    (source / "model.safetensors").rename(tmp_path / "out" / "weights.safetensors")
    (source / "model.safetensors").symlink_to(tmp_path / "out" / "weights.safetensors")
    refused(OutputExistsError, r"holds model\.safetensors, which is read from", source, tmp_path, overwrite=True)
    assert (source / "model.safetensors").exists()


def test_a_file_of_that_name_stays(checkpoint, tmp_path):
    (tmp_path / "out").write_text("mine")
    refused(OutputExistsError, "not a folder", checkpoint, tmp_path, overwrite=True)


def test_a_folder_to_make_it_in_has_to_be_there(checkpoint, tmp_path):
    with pytest.raises(StorageError, match="is no folder"):
        quantize_checkpoint(checkpoint, tmp_path / "a" / "b")


def test_a_folder_that_cannot_be_written_to_is_said(checkpoint, tmp_path, monkeypatch):
    from pathlib import Path

    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)  # rights do not bind every user
        with pytest.raises(StorageError, match=r"cannot be written to \(Permission denied\)"):
            quantize_checkpoint(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_parts_that_depend_on_values_are_refused(checkpoint, tmp_path, monkeypatch):
    whole = Halves.to_offload_state

    def fewer(self):
        state = whole(self)
        if float(self.largest) > 0:
            state["tensors"]["half"] = state["tensors"]["half"][:-1]
        return state

    monkeypatch.setattr(Halves, "to_offload_state", fewer)
    refused(FormatError, "depend on values", checkpoint, tmp_path, weights="noted_halves")


def test_a_tensor_type_that_is_not_known_is_named(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refused(FormatError, "F8_E4M3", source, tmp_path)
