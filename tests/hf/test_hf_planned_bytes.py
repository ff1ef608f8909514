"""What a device map is planned with is what the loaded model takes."""

import models
import pytest
import torch
from transformers.integrations.accelerate import compute_module_sizes, infer_auto_device_map

from t2n_hf import T2NConfig
from t2n_hf.hf.quantizer import T2NQuantizer
from t2n_hf.hf.weights import held_nbytes


def planned(make, **options):
    """An empty model and its quantizer, as from_pretrained has them when it plans."""
    with torch.device("meta"):
        model = make().to("meta")
    quantizer = T2NQuantizer(T2NConfig(**options), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=torch.float32, device_map="auto", checkpoint_files=[])
    return model, quantizer


CASES = [
    ("m1", {}),
    ("m1", {"embeddings": "q4_0"}),
    ("m2", {"embeddings": "q4_0", "compute": "fast"}),
    ("m1", {"lm_head": "q4_0", "compute": "fast"}),
    ("m4", {}),
    ("m4", {"compute": "fast"}),
    ("m10", {}),
    ("m10", {"compute": "fast"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(o) or 'default'}" for n, o in CASES])
def test_planned_bytes_are_the_real_ones(name, options, tmp_path):
    make = getattr(models, name)
    model, quantizer = planned(make, **options)
    sizes, _ = compute_module_sizes(model, quantizer, only_modules=False)
    source = make()
    folder = models.saved(source, tmp_path)
    loaded = type(source).from_pretrained(folder, dtype="auto", quantization_config=T2NConfig(**options))
    real = {n: held_nbytes(p) for n, p in loaded.named_parameters()}
    assert {n: sizes[n] for n in real} == real
    assert sizes[""] == loaded.get_memory_footprint()
    ids = models.prompt()
    with torch.no_grad():
        loaded(ids)
    assert sizes[""] == loaded.get_memory_footprint()


def test_planned_bytes_of_a_packed_checkpoint_are_the_real_ones(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    packed = type(source).from_pretrained(folder, dtype="auto", quantization_config=T2NConfig(embeddings="q4_0"))
    again = models.saved(packed, tmp_path)
    need = packed.get_memory_footprint()
    roomy = type(source).from_pretrained(again, dtype="auto", device_map="auto", max_memory={"cpu": need * 2})
    assert roomy.get_memory_footprint() == need
    tight = type(source).from_pretrained(again, dtype="auto", device_map="auto", max_memory={"cpu": int(need * 0.8)})
    assert "disk" in tight.hf_device_map.values()
    assert tight.get_memory_footprint() < need * 0.8


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0, 1.5, 2.0])
def test_a_layer_goes_to_disk_only_when_memory_is_full(share):
    model, quantizer = planned(models.m2, modules_to_not_convert=["lm_head"])
    sizes, _ = compute_module_sizes(model, quantizer)
    limit = int(sizes[""] * share)
    device_map = infer_auto_device_map(
        model, max_memory={"cpu": limit}, no_split_module_classes=model._no_split_modules, hf_quantizer=quantizer
    )
    in_memory = sum(
        quantizer.param_element_size(model, name, p) * p.numel()
        for name, p in model.named_parameters()
        if not any(where == "disk" and (not m or f"{name}.".startswith(f"{m}.")) for m, where in device_map.items())
    )
    assert in_memory <= limit
    largest = max(sizes[name] for name in ("lm_head", "model.embed_tokens", "model.layers.0"))
    if sizes[""] + largest <= limit:
        assert set(device_map.values()) == {"cpu"}
    if sizes[""] > limit:
        assert "disk" in device_map.values()
        assert share < 0.7 or "cpu" in device_map.values()


def test_every_limit_that_holds_the_largest_module_can_be_used(tmp_path):
    """Vectors and buffers stay in memory wherever their module is: the plan leaves room for them."""
    source = models.m2(num_hidden_layers=6)
    folder = models.saved(source, tmp_path)
    for limit in range(70_000, 260_000, 8_000):
        model = type(source).from_pretrained(
            folder, quantization_config=T2NConfig(), dtype="auto", device_map="auto", max_memory={"cpu": limit}
        )
        assert model.get_memory_footprint() <= limit


def test_the_first_map_is_the_users_and_the_second_is_changed_in_place():
    """transformers does not say so anywhere: it calls validate_environment twice, and we depend on which is which."""
    quantizer = T2NQuantizer(T2NConfig(), pre_quantized=False)
    users = {"a": "disk", "": "cpu"}
    quantizer.validate_environment(device_map=users, weights_only=True)
    assert users == {"a": "disk", "": "cpu"}
    assert quantizer.update_device_map(users) == {"a": "cpu", "": "cpu"}
    assert quantizer.update_device_map("auto") == "auto"
    inferred = {"a": "cpu", "b": "disk"}
    quantizer.validate_environment(device_map=inferred)
    assert inferred == {"a": "cpu", "b": "cpu"}
