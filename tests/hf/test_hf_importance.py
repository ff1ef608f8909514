"""Importance: its file, and which weight it is for."""

import json

import models
import pytest
import safetensors.torch
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from t2n_hf import Importance, T2NConfig, load_checkpoint_and_dispatch
from t2n_hf.errors import CheckpointNotFoundError, ConfigError, FormatError, StorageError
from t2n_hf.hf.calibration.importance import importance_for
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.hf.plan import make_plan

UP = "model.layers.0.mlp.up_proj.weight"


def some() -> Importance:
    values = {"b.weight": torch.linspace(0, 1, 64), "a.experts": torch.rand(3, 32)}
    return Importance(values, source="someone/model", tokens=77)


def test_a_file_holds_everything_and_the_same_bytes_each_time(tmp_path):
    before = some()
    before.save(tmp_path / "one")
    again = Importance.load(tmp_path / "one")
    assert (again.source, again.tokens, set(again)) == ("someone/model", 77, set(before))
    assert all(torch.equal(again[name], before[name]) for name in before)
    again.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_other_programs_can_read_the_file(tmp_path):
    some().save(tmp_path / "one")
    with safe_open(tmp_path / "one", "pt") as file:
        facts = json.loads(file.metadata()["t2n_hf.importance"])
        assert torch.equal(file.get_tensor("b.weight"), some()["b.weight"])
    assert facts == {"schema_version": 1, "source": "someone/model", "tokens": 77}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (None, "holds no importance"),
        ({"t2n_hf.importance": "[]"}, "JSON"),
        ({"t2n_hf.importance": '{"schema_version": 2, "source": "", "tokens": 1}'}, "schema 2"),
        ({"t2n_hf.importance": '{"schema_version": 1, "source": 3, "tokens": 1}'}, "needs a source"),
    ],
    ids=["other file", "no object", "newer", "wrong kinds"],
)
def test_a_file_of_something_else_is_refused(metadata, text, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "file", metadata)
    with pytest.raises(FormatError, match=text):
        Importance.load(tmp_path / "file")


def test_a_truncated_or_missing_file_is_named(tmp_path):
    some().save(tmp_path / "one")
    (tmp_path / "cut").write_bytes((tmp_path / "one").read_bytes()[:-5])
    with pytest.raises(StorageError, match="cut"):
        Importance.load(tmp_path / "cut")
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        Importance.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    "value",
    [torch.ones(3).half(), torch.ones(2, 3, 4), torch.tensor([1, float("nan")]), -torch.ones(3), torch.ones(0)],
    ids=["f16", "three axes", "nan", "negative", "empty"],
)
def test_values_that_are_no_importance_are_refused_by_name(value):
    with pytest.raises(FormatError, match=r"importance of some\.weight"):
        Importance({"some.weight": value})


def chosen(model, given, **options):
    config = T2NConfig(modules_to_not_convert=[], **options)
    return importance_for(model, make_plan(model, config), given)


def test_a_weight_takes_what_has_its_name_and_others_go_without():
    found = chosen(models.m1(), {UP: torch.ones(64), "elsewhere": torch.ones(7), "model.norm.weight": torch.ones(3)})
    assert list(found) == [UP]
    assert chosen(models.m1(), None) == {}


def test_any_name_of_a_tied_table_will_do():
    found = chosen(models.m1(), {"lm_head.weight": torch.full((64,), 2.0)}, embeddings="q4_0")
    assert torch.equal(found["model.embed_tokens.weight"], torch.full((64,), 2.0))


def test_a_model_without_its_head_finds_what_was_calibrated_with_it():
    inner = models.m1().model
    inner.base_model_prefix = "model"
    assert list(chosen(inner, {UP: torch.ones(64)})) == [UP.removeprefix("model.")]
    assert list(chosen(models.m1(), {UP.removeprefix("model."): torch.ones(64)})) == [UP]


def test_experts_take_one_vector_each_or_one_for_all():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for value in (torch.rand(4, 64), torch.rand(64)):
        assert torch.equal(chosen(models.m4(), {name: value})[name], value)


def test_turned_weights_are_counted_along_their_input_channels():
    name = "transformer.h.0.mlp.c_fc.weight"  # (in, out) = (64, 256)
    assert list(chosen(models.m10(), {name: torch.ones(64)})) == [name]
    with pytest.raises(ConfigError, match="64 input channels, and importance of shape"):
        chosen(models.m10(), {name: torch.ones(256)})


@pytest.mark.parametrize(("name", "value"), [(UP, torch.ones(63)), (UP, torch.ones(4, 64))], ids=["length", "stack"])
def test_importance_of_the_wrong_size_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight has 64 input channels"):
        chosen(models.m1(), {name: value})


def test_importance_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="another model \\(someone/model\\)"):
        chosen(models.m1(), some())


def test_a_loaded_model_uses_the_file_and_config_json_does_not_tell_of_it(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    importance = Importance({UP: torch.rand(64) ** 4})
    importance.save(tmp_path / "importance.safetensors")

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=T2NConfig(**options))

    plain, weighted = load(), load(importance=tmp_path / "importance.safetensors")
    source = models.m1()
    for name, parameter in weighted.named_parameters():
        differs = not torch.equal(parameter, plain.get_parameter(name))
        assert differs == (name == UP)
    weight = source.get_parameter(UP).detach()
    gains = [
        float(((m.get_parameter(UP).to_base_tensor() - weight).square() * importance[UP]).sum())
        for m in (weighted, plain)
    ]
    assert gains[0] < 0.95 * gains[1]
    weighted.save_pretrained(tmp_path / "saved")
    assert "importance" not in json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.get_parameter(UP), weighted.get_parameter(UP))


@pytest.mark.parametrize("wrong", [3, b"bytes", ["a"]], ids=str)
def test_the_option_takes_a_path(wrong):
    with pytest.raises(ConfigError, match="importance="):
        T2NConfig(importance=wrong)


def test_every_way_to_load_uses_it(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    Importance({UP: torch.rand(64) ** 4}).save(tmp_path / "importance")
    config = T2NConfig(importance=tmp_path / "importance")
    plain, expected = (load_checkpoint(folder, config=c, device_map=None) for c in (T2NConfig(), config))
    on_disk = load_checkpoint(folder, config=config)
    with init_empty_weights():
        empty = LlamaForCausalLM(expected.config)
    dispatched = load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"}, quantization_config=config)
    for model in (on_disk, dispatched):
        assert torch.equal(model.get_parameter(UP), expected.get_parameter(UP))
        assert not torch.equal(model.get_parameter(UP), plain.get_parameter(UP))


def test_beside_a_quantized_checkpoint_it_is_said_to_be_ignored(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    load_checkpoint(folder, weights="q4_0", device_map=None).save_pretrained(tmp_path / "packed")
    with pytest.warns(UserWarning, match="importance is ignored"):
        load_checkpoint(tmp_path / "packed", config=T2NConfig(importance=tmp_path / "none"), device_map=None)
