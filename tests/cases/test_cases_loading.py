"""Ways to load in which weights, ties, classes or budgets were lost elsewhere; each held to values made another way."""

import gc
import hashlib
import json

import models
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from t2n_hf import T2NConfig
from t2n_hf.errors import BudgetError, ConfigError, QuantizationError, StorageError, UnknownTagError
from t2n_hf.hf.hooks import leases_of, offloaded_parameters
from t2n_hf.hf.report import coverage_of
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

DISK = {"": "disk"}
PROJECTIONS = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
TARGETS = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in PROJECTIONS]
TABLE = "model.embed_tokens.weight"


def load(folder, quantization=None, **options):
    if quantization is not None:  # None would hide what config.json says
        options["quantization_config"] = quantization
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def logits(model):
    with torch.no_grad():
        return model(models.prompt()).logits


def greedy(model):
    ids = models.prompt().to(model.device)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)


def class_of(parameter):
    return parameter.inner_class if isinstance(parameter, OffloadedTensor) else type(parameter)


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("layer", ["model.layers.0", "model.layers.1"])
def test_a_layer_that_is_mapped_to_disk_is_quantized_and_saved_packed(layer, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    whole = load(folder, T2NConfig(), device_map="cpu")
    part = load(folder, T2NConfig(), device_map={"": "cpu", layer: "disk"})
    on_disk = set(offloaded_parameters(part))
    assert on_disk == {name for name in TARGETS if name.startswith(layer)}
    assert {name: class_of(part.get_parameter(name)) for name in TARGETS} == dict.fromkeys(
        TARGETS, QTensorTractScaleOnly
    )
    assert torch.equal(logits(part), logits(whole))
    assert content(models.saved(part, tmp_path)) == content(models.saved(whole, tmp_path))


@pytest.mark.parametrize("options", [{}, {"embeddings": "q4_0"}], ids=["plain table", "packed table"])
@pytest.mark.parametrize("on_disk", ["model.embed_tokens", "lm_head", ""])
def test_a_tied_table_is_placed_as_one_whichever_of_its_names_is_mapped_to_disk(on_disk, options, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    expected = load(folder, T2NConfig("none", **options))
    model = load(folder, T2NConfig("none", **options), device_map={"": "cpu", on_disk: "disk"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, OffloadedTensor) is (on_disk == "")
    assert not any(p.device.type == "meta" for p in model.parameters())
    assert torch.equal(logits(model), logits(expected))
    assert torch.equal(greedy(model), greedy(expected))


@pytest.mark.parametrize("device_map", [DISK, {"model.embed_tokens": "disk", "": "cpu"}], ids=["all", "first"])
def test_inputs_go_to_the_device_of_a_model_whose_first_parameter_is_on_disk(device_map, tmp_path):
    source = models.m2()
    model = load(models.saved(source, tmp_path), T2NConfig("none"), device_map=device_map)
    assert isinstance(next(model.parameters()), OffloadedTensor)
    assert model.device == torch.device("cpu")
    assert torch.equal(greedy(model), greedy(source))


@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_a_pool_counts_packed_weights_at_the_bytes_that_they_hold(compute, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    model = load(folder, T2NConfig(compute=compute, max_resident_bytes=10 << 20), device_map=DISK)
    logits(model)
    pool = leases_of(model).pool
    held = sum(p.reload().opaque_nbytes for n, p in offloaded_parameters(model).items() if n in TARGETS)
    table = 256 * 64 * 4
    assert pool.resident_bytes == held + table
    values = sum(model.get_parameter(name).numel() for name in TARGETS)
    assert compute == "fast" or held == values // 32 * 18
    assert held < values  # a fourth of float32 at most


def test_a_budget_that_packed_weights_fit_is_enough_although_float_ones_would_not(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    largest = 128 * 64 // 32 * 18
    options = {"embeddings": "q4_0", "max_resident_bytes": 256 * 64 // 32 * 18}
    model = load(folder, T2NConfig(**options), device_map=DISK)
    assert torch.equal(logits(model), logits(load(folder, T2NConfig(embeddings="q4_0"))))
    assert largest <= leases_of(model).pool.resident_bytes <= options["max_resident_bytes"]
    with pytest.raises(BudgetError, match="lm_head needs at once"):
        load(
            folder, T2NConfig(embeddings="q4_0", max_resident_bytes=options["max_resident_bytes"] - 1), device_map=DISK
        )


@pytest.mark.parametrize("weights", ["q4_0", "none"])
def test_generate_is_right_after_a_layer_raised_and_no_lease_is_left(weights, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    model = load(folder, T2NConfig(weights, max_resident_bytes=70_000), device_map=DISK)
    expected = greedy(load(folder, T2NConfig(weights)))
    pool = leases_of(model).pool
    down = model.model.layers[1].mlp.down_proj

    def fail(module, args, output):
        assert pool.lease_count > 0
        raise RuntimeError("half way")

    handle = down.register_forward_hook(fail, prepend=True)
    with pytest.raises(RuntimeError, match="half way"):
        greedy(model)
    handle.remove()
    assert pool.lease_count == 0
    assert torch.equal(greedy(model), expected)
    assert pool.lease_count == 0
    assert pool.resident_bytes <= 70_000


@pytest.mark.parametrize("first_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("second_map", [None, DISK], ids=["memory again", "disk again"])
@pytest.mark.parametrize("name", ["m1", "m4", "m4_qwen3"])
def test_saving_and_loading_twice_keeps_classes_and_bytes_wherever_weights_live(name, first_map, second_map, tmp_path):
    packed = load(models.saved(getattr(models, name)(), tmp_path), T2NConfig(), device_map=first_map)
    first = models.saved(packed, tmp_path)
    again = load(first, device_map=second_map)
    classes = {n: class_of(p) for n, p in again.named_parameters()}
    assert {n for n, kind in classes.items() if kind is QTensorTractScaleOnly} == {
        n for n, p in again.named_parameters() if p.dim() == 3 or ("layers" in n and "_proj" in n)
    }
    for n, p in packed.named_parameters():
        ours = again.get_parameter(n)
        assert torch.equal(ours.to_base_tensor() if hasattr(ours, "to_base_tensor") else ours, _dense(p)), n
    assert content(models.saved(again, tmp_path)) == content(first)


def _dense(parameter):
    return parameter.to_base_tensor() if hasattr(parameter, "to_base_tensor") else parameter


TIED = {
    "both": ({"embeddings": "q4_0", "lm_head": "q4_0"}, True),
    "the embeddings": ({"embeddings": "q4_0"}, True),
    "the head": ({"lm_head": "q4_0"}, True),
    "neither": ({"embeddings": "none", "lm_head": "none"}, False),
}


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("choice", TIED)
def test_a_tied_table_is_stored_once_whatever_is_chosen_of_it(choice, device_map, tmp_path):
    options, is_packed = TIED[choice]
    packed = load(models.saved(models.m1(), tmp_path), T2NConfig(**options), device_map=device_map)
    first = models.saved(packed, tmp_path)
    stored = [key for key in CheckpointIndex.open(first) if "embed_tokens" in key or "lm_head" in key]
    assert stored == [f"{TABLE}_q4_0" if is_packed else TABLE]
    assert json.loads((first / "config.json").read_text())["tie_word_embeddings"] is True
    again = load(first, device_map=device_map)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert (class_of(again.lm_head.weight) is QTensorTractScaleOnly) is is_packed
    assert torch.equal(logits(again), logits(packed))


def test_choices_that_would_untie_a_table_are_refused(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    for options in ({"embeddings": "q4_0", "lm_head": "none"}, {"embeddings": "none", "lm_head": "q4_0"}):
        with pytest.raises(ConfigError, match="one tied table"):
            load(folder, T2NConfig(**options))


def test_a_block_of_zeros_and_one_of_tiny_values_survive_saving_and_loading(tmp_path):
    source = models.m1()
    with torch.no_grad():
        weight = source.model.layers[0].mlp.up_proj.weight
        weight[0, :32] = 0
        weight[1, :32] = 1e-8
    packed = load(models.saved(source, tmp_path), T2NConfig())
    for model in (packed, load(models.saved(packed, tmp_path))):
        values = model.model.layers[0].mlp.up_proj.weight.to_base_tensor()
        assert torch.equal(values[0, :32], torch.zeros(32))
        assert torch.isfinite(values).all()
        assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_value_that_is_no_number_is_refused_by_name_wherever_the_weight_lives(bad, device_map, tmp_path):
    source = models.m4()
    with torch.no_grad():
        source.model.layers[1].mlp.experts.down_proj[2, 5, 7] = bad
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        load(models.saved(source, tmp_path), T2NConfig(), device_map=device_map)


def test_columns_that_are_no_whole_blocks_stay_float_and_the_report_says_why(tmp_path):
    source = models.m1(intermediate_size=80)  # only down_proj has rows of 80
    packed = load(models.saved(source, tmp_path), T2NConfig())
    dense = coverage_of(packed).dense
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert "80" in dense[name]
        assert type(packed.get_parameter(name)) is nn.Parameter
        assert torch.equal(packed.get_parameter(name), source.get_parameter(name))
    assert len(dense) == 3  # those two and the table
    assert sum(class_of(p) is QTensorTractScaleOnly for p in packed.parameters()) == 12


def test_a_saved_config_with_an_unknown_key_or_tag_says_which(tmp_path):
    packed = load(models.saved(models.m1(), tmp_path), T2NConfig())
    folder = models.saved(packed, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["groups"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no option 'groups'"):
        load(folder)
    del config["quantization_config"]["groups"]
    config["quantization_config"]["weights"] = "acme.int3.v1"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownTagError, match=r"acme\.int3\.v1.*t2n_hf\.q4_0\.v1.*pip install acme"):
        load(folder)


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("weights", ["q4_0", "none"])
def test_a_truncated_shard_is_named_before_any_weight_is_used(weights, device_map, tmp_path):
    folder = models.saved(models.m2(), tmp_path, max_shard_size="40KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])
    gc.collect()
    with pytest.raises(StorageError, match=shards[-1].name):
        load(folder, T2NConfig(weights), device_map=device_map)
