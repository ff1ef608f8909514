"""Budgets: what a limit on memory decides, that more of it is never worse, and what an error says."""

import re

import models
import pytest
import torch
from transformers import TextGenerationPipeline
from transformers.integrations.accelerate import compute_module_sizes, infer_auto_device_map

from t2n_hf import T2NConfig, plan_placement
from t2n_hf.errors import BudgetError, ConfigError, UnsupportedOpError
from t2n_hf.hf.hooks import leases_of
from t2n_hf.hf.placement.cache_size import cache_nbytes
from t2n_hf.hf.placement.device_map import Placement
from t2n_hf.hf.placement.infer import infer_map
from t2n_hf.hf.placement.needs import Weight, needs_of, stays_in_memory
from t2n_hf.hf.placement.preflight import preflight
from t2n_hf.tensor.offload import OffloadedTensor


def load(source, folder, quantization, **options):
    return type(source).from_pretrained(folder, dtype="auto", quantization_config=quantization, **options)


def logits(model):
    with torch.no_grad():
        return model(models.prompt()).logits


def resident(model):
    held = sum(p.nbytes for p in model.parameters() if type(p) is torch.nn.Parameter)
    packed = sum(getattr(p, "opaque_nbytes", 0) for p in model.parameters())
    return held + packed + sum(b.nbytes for b in model.buffers())


CASES = [("m1", "none", {}), ("m1", "q4_0", {"embeddings": "q4_0"}), ("m2", "q4_0", {}), ("m4", "q4_0", {})]


@pytest.mark.parametrize(("name", "weights", "options"), CASES, ids=[f"{n}-{w}" for n, w, _ in CASES])
@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
def test_more_memory_never_turns_a_run_into_an_error(name, weights, options, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path)
    expected = logits(load(source, folder, T2NConfig(weights, **options), experts_implementation="eager"))
    with pytest.raises(BudgetError, match="The least that works") as refused:
        load(source, folder, T2NConfig(weights, **options), device_map="auto", max_memory={"cpu": 1000})
    least = int(re.search(r"least that works with this map is (\d+)", str(refused.value))[1])
    with pytest.raises(BudgetError, match=f"is {least};"):
        load(source, folder, T2NConfig(weights, **options), device_map="auto", max_memory={"cpu": least - 1})
    total = sum(p.nbytes for p in source.parameters())
    kept = []
    for limit in (least, *range(least + 1, total + 60_000, (total + 60_000 - least) // 8)):
        model = load(source, folder, T2NConfig(weights, **options), device_map="auto", max_memory={"cpu": limit})
        assert torch.equal(logits(model), expected)
        assert model.get_memory_footprint() <= limit
        leases = leases_of(model)
        assert resident(model) + (leases.pool.max_cached_bytes if leases else 0) <= limit
        kept.append(resident(model))
    assert kept == sorted(kept)
    assert leases is None
    assert model.hf_device_map == {"": "cpu"}


def test_limits_can_be_given_as_text(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none"), device_map="auto", max_memory={"cpu": "200KB"})
    assert resident(model) + leases_of(model).pool.max_cached_bytes <= 200_000


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_every_planned_map_keeps_the_limit(device_map, tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none"), device_map=device_map, max_memory={"cpu": 200_000})
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    assert torch.equal(logits(model), logits(source))
    assert model.get_memory_footprint() <= 200_000


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.1, 1.5])
def test_nothing_is_on_disk_that_accelerate_would_keep(share):
    """accelerate keeps whole layers and sets aside the largest one: we never keep less than it does."""
    source = models.m2(num_hidden_layers=6)
    sizes, _ = compute_module_sizes(source)
    limit = max(int(sizes[""] * share), 150_000)
    theirs = infer_auto_device_map(source, max_memory={"cpu": limit}, no_split_module_classes=source._no_split_modules)
    kept = sum(
        p.nbytes
        for name, p in source.named_parameters()
        if any(where == "cpu" and (not m or f"{name}.".startswith(f"{m}.")) for m, where in theirs.items())
    )
    ours = _planned(source, limit)
    assert ours.devices[0].resident + ours.devices[0].budget <= limit
    assert ours.devices[0].resident + ours.devices[0].budget >= kept


def _planned(source, limit):
    needs = needs_of(source, lambda names, p: Weight(names=names, nbytes=p.nbytes, kept=stays_in_memory(p)), {})
    placement = Placement()
    placement.limits = {"cpu": limit}
    placement.take(infer_map(source, needs, placement.limits, no_split=source._no_split_modules))
    return preflight(needs, placement)


def test_a_budget_for_weights_on_disk_has_to_hold_the_largest_module(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    for budget in (0, 1, 65_535):
        with pytest.raises(
            BudgetError, match=r"lm_head needs at once \(65536\).*embed_tokens.*max_resident_bytes=65536"
        ):
            load(source, folder, T2NConfig("none", max_resident_bytes=budget), device_map={"": "disk"})
    model = load(source, folder, T2NConfig("none", max_resident_bytes=65_536), device_map={"": "disk"})
    assert torch.equal(logits(model), logits(source))


@pytest.mark.parametrize("name", ["m1", "m3", "m5", "m6"])
def test_keys_and_values_take_the_bytes_that_were_planned(name, tmp_path):
    model = getattr(models, name)()
    ids = models.prompt(20, batch=2)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    found = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    planned = cache_nbytes(model.config, 20, 2, model.dtype)
    window = getattr(model.config, "sliding_window", None)
    for layer, (real, expected) in enumerate(zip(found, planned, strict=True)):
        kind = (getattr(model.config, "layer_types", None) or ["full_attention"] * len(found))[layer]
        if kind == "full_attention" or not window or window > 20:
            assert real == expected
        else:  # the token that is being computed is there for a moment beside the window's others
            assert real <= expected <= real // (window - 1) * window


def test_a_long_generation_costs_residency_and_keeps_the_limit(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    limit = 200_000
    short = load(source, folder, T2NConfig("none"), device_map="auto", max_memory={"cpu": limit})
    long = load(source, folder, T2NConfig("none", max_length=100), device_map="auto", max_memory={"cpu": limit})
    cache = 100 * 2 * 2 * 16 * 4 * 2  # tokens, keys and values, heads, head size, float32, layers
    assert long.hf_quantizer.placement.devices[0].cache == cache
    assert resident(long) + leases_of(long).pool.max_cached_bytes <= limit - cache
    assert resident(short) > resident(long)
    quantization = T2NConfig("none", max_length=100, batch_size=4)
    with pytest.raises(BudgetError, match=f"beside {4 * cache} for keys and values"):
        load(source, folder, quantization, device_map="auto", max_memory={"cpu": limit})
    half = T2NConfig("none", max_length=100, max_resident_bytes=120_000)
    assert leases_of(load(source, folder, half, device_map={"": "disk"})).pool.max_cached_bytes == 120_000 - cache


def test_a_map_that_names_a_device_which_is_not_there_is_refused(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    source = models.m1()
    folder = models.saved(source, tmp_path)
    for device_map in ({"": 0}, {"model": "cuda:1", "": "disk"}, {"model": torch.device("cuda"), "lm_head": "cpu"}):
        with pytest.raises(ConfigError, match="this machine has no accelerator"):
            load(source, folder, T2NConfig(), device_map=device_map)
    with pytest.raises(ConfigError, match="'somewhere' is no device"):
        load(source, folder, T2NConfig(), device_map={"": "somewhere"})


@pytest.mark.parametrize(
    "device_map",
    [
        {"model.layers.1": "disk"},
        {"model.layers.0.mlp.up_proj.weight": "disk", "": torch.device("cpu")},
        {"model.layers": "disk", "model.layers.1.mlp": "cpu"},
    ],
    ids=["partial", "one weight", "a part of a part"],
)
def test_a_map_for_some_modules_leaves_the_others_in_memory(device_map, tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none"), device_map=device_map)
    assert torch.equal(logits(model), logits(source))
    for name, parameter in model.named_parameters():
        path = name
        while path and path not in device_map:
            path = path.rpartition(".")[0]
        asked = device_map.get(path, "cpu") == "disk" and parameter.dim() > 1
        assert isinstance(parameter, OffloadedTensor) is asked, name
    true = model.hf_device_map
    assert set(true.values()) <= {"cpu", "disk", torch.device("cpu")}
    uncovered = [
        n for n, _ in model.named_parameters() if "" not in true and not any(f"{n}.".startswith(f"{k}.") for k in true)
    ]
    assert not uncovered


def test_the_report_is_a_table_of_what_was_planned(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("q4_0"), device_map="auto", max_memory={"cpu": 150_000})
    report = model.hf_quantizer.placement
    (row,) = report.devices
    assert row.resident == resident(model)
    assert row.budget == leases_of(model).pool.max_cached_bytes
    assert row.limit == 150_000
    on_disk = [p for p in model.parameters() if isinstance(p, OffloadedTensor)]
    spilled = sum(p.nbytes_loaded for p in on_disk if p.inner_class is not None)
    assert report.spilled == spilled
    assert report.read_in_place == sum(p.nbytes_loaded for p in on_disk) - spilled
    text = str(report)
    assert f"{row.resident:,}" in text
    assert "are read from the checkpoint where they are" in text


def test_pipelines_take_a_model_that_is_on_disk(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    for device_map in ({"": "disk", "model.norm": "cpu"}, {"": "disk"}):
        model = load(source, folder, T2NConfig("none"), device_map=device_map)
        pipe = TextGenerationPipeline(model=model, tokenizer=None)
        assert pipe.device == torch.device("cpu")
    planned = load(source, folder, T2NConfig("none"), device_map="auto", max_memory={"cpu": 200_000})
    assert next(iter(planned.hf_device_map.values())) == "cpu"


def test_a_model_with_weights_on_disk_stays_where_it_is(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig(), device_map={"": "disk"})
    assert model.to("cpu") is model
    assert model.cpu() is model
    with pytest.raises(UnsupportedOpError, match="cannot be moved to cuda"):
        model.to("cuda:0")
    with pytest.raises(UnsupportedOpError, match="cannot be moved to cuda"):
        model.cuda()
    expected = logits(model)
    assert torch.equal(logits(model.to(torch.float32)), expected)
    resident_model = load(source, folder, T2NConfig())
    assert torch.equal(logits(resident_model.to("cpu")), expected)
    assert "to" not in vars(resident_model)


def test_a_model_without_keys_and_values_says_that_it_takes_no_max_length():
    model = models.m7()
    assert plan_placement(model, T2NConfig("none"), "cpu").ram > 0
    with pytest.raises(ConfigError, match=r"max_length=32: .*linear_attention.*; leave max_length out"):
        plan_placement(model, T2NConfig("none"), "cpu", max_length=32)
