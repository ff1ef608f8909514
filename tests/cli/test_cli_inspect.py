"""`t2n-hf inspect`: errors against the weights that something was made from, and why matrices stayed float."""

import json

import models
import numpy as np
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.cli import main as cli
from t2n_hf.export import export_nnef

MAKERS = {"llama": models.m1, "mixtral": models.m4, "gpt2": models.m10}


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


def inspected(capsys, *arguments):
    assert run("inspect", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def packed_of(source, folder, **options):
    options = {"weights": "q4_0", **options}
    model = type(source).from_pretrained(folder, dtype="auto", quantization_config=T2NConfig(**options))
    return model.eval()


def errors_by_numpy(source, packed):
    result = {}
    for name, parameter in packed.named_parameters():
        if hasattr(parameter, "to_base_tensor"):
            true, found = source.get_parameter(name).detach().numpy(), parameter.to_base_tensor().numpy()
            result[name] = np.linalg.norm(found - true) / np.linalg.norm(true)
    return result


@pytest.mark.parametrize(("name", "weights"), [*((name, "q4_0") for name in MAKERS), ("gpt2", "int8_rows")])
def test_errors_of_a_checkpoint_are_those_of_its_whole_weights(name, weights, tmp_path, capsys):
    source = MAKERS[name]()
    original = models.saved(source, tmp_path)
    packed = packed_of(source, original, weights=weights)
    found = inspected(capsys, models.saved(packed, tmp_path), "--against", original)
    told = {t["weight"]: t["relative_error"] for t in found["tensors"] if t["relative_error"] is not None}
    expected = errors_by_numpy(source, packed)
    assert told.keys() == expected.keys()
    assert len(told) >= 7
    for weight, error in expected.items():
        assert told[weight] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_errors_of_an_export_are_those_of_its_blocks(name, tmp_path, capsys):
    source = MAKERS[name]()
    original = models.saved(source, tmp_path)
    packed = packed_of(source, original)
    export_nnef(packed, tmp_path / "out", check=False)
    for path in (tmp_path / "out", tmp_path / "out" / "model.nnef.tgz"):
        found = inspected(capsys, path, "--against", original)
        told = {t["name"]: t["relative_error"] for t in found["tensors"] if t["format"] == "q4_0"}
        expected = {weight: error for weight, error in errors_by_numpy(source, packed).items() if weight in told}
        assert len(told) >= 8
        for weight, error in expected.items():
            assert told[weight] == pytest.approx(error, rel=1e-4)
        assert {t["relative_error"] for t in found["tensors"] if t["format"] == "f32"} == {None}


def test_the_text_tells_errors_and_reasons_of_numbered_layers_once(tmp_path, capsys):
    source = models.m4()
    original = models.saved(source, tmp_path)
    packed = models.saved(packed_of(source, original, modules_to_not_convert=["k_proj"]), tmp_path)
    assert run("inspect", packed, "--against", original) == 0
    out = capsys.readouterr().out.splitlines()
    line = next(line for line in out if "experts.down_proj" in line)
    assert "2 x  q4_0" in line
    low, word, high = line.rpartition("error ")[2].split()
    assert (word, 0.05 < float(low) <= float(high) < 0.1) == ("to", True)
    assert "  dense: model.layers.*.self_attn.k_proj.weight (2): modules_to_not_convert names 'k_proj'" in out
    assert "  dense: model.embed_tokens.weight: embeddings and head stay float unless asked for" in out
    assert run("inspect", packed) == 0
    assert "error" not in capsys.readouterr().out


def test_a_model_that_this_transformers_does_not_know_is_shown_without_reasons(tmp_path, capsys):
    source = models.m1()
    packed = models.saved(packed_of(source, models.saved(source, tmp_path)), tmp_path)
    config = json.loads((packed / "config.json").read_text())
    config.update(architectures=["OfAnotherTime"], model_type="of_another_time")
    (packed / "config.json").write_text(json.dumps(config))
    found = inspected(capsys, packed)
    assert found["dense"] == {}
    assert {tensor["format"] for tensor in found["tensors"]} == {"f32", "q4_0"}


def test_weights_of_another_model_are_refused(tmp_path, capsys):
    source = models.m1()
    packed = models.saved(packed_of(source, models.saved(source, tmp_path)), tmp_path)
    other = models.saved(models.m1(hidden_size=128), tmp_path)
    assert run("inspect", packed, "--against", other) == 1
    assert "give the checkpoint that it was made from" in capsys.readouterr().err
    assert run("inspect", packed, "--against", tmp_path / "nowhere") == 1
    assert "neither a model folder nor a repository" in capsys.readouterr().err


def test_a_cast_of_the_original_does_not_count_as_an_error_of_the_format(tmp_path, capsys):
    source = models.m8()
    original = models.saved(source, tmp_path)
    packed = packed_of(source, original, weights="q8_1")
    found = inspected(capsys, models.saved(packed, tmp_path), "--against", original)
    for tensor in found["tensors"]:
        if tensor["relative_error"] is not None:
            weight = packed.get_parameter(tensor["weight"]).to(torch.float32).to_base_tensor()
            true = source.get_parameter(tensor["weight"]).detach().float()
            assert tensor["relative_error"] == pytest.approx(float((weight - true).norm() / true.norm()), rel=1e-4)
