"""A model with weights on disk stays where it is, and what is put beside them goes where they compute."""

import copy

import models
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from t2n_hf import T2NConfig, materialize
from t2n_hf.hf.hooks import leases_of, offloaded_parameters

MAPS = [{"": "disk"}, {"": "cpu", "model.layers.1": "disk"}, {"": "cpu"}]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model's folder, an adapter's folder, and the logits of both together."""
    folder = tmp_path_factory.mktemp("adapted")
    source = models.saved(models.m1(), folder)
    model = get_peft_model(load(source, None), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder / "adapter")
    return source, folder / "adapter", logits(model)


def load(folder, device_map):
    model_class = type(models.m1())
    return model_class.from_pretrained(folder, quantization_config=T2NConfig(), dtype="auto", device_map=device_map)


def logits(model):
    with torch.no_grad():
        return model(models.prompt()).logits


@pytest.mark.parametrize("device_map", MAPS, ids=str)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_beside_weights_on_disk_is_loaded_whichever_library_does(device_map, adapted):
    folder, adapter, expected = adapted
    model = load(folder, device_map)
    on_disk = len(offloaded_parameters(model))
    told = getattr(model, "hf_device_map", None)
    model.load_adapter(str(adapter))
    assert torch.equal(logits(model), expected)
    assert getattr(model, "hf_device_map", None) == told
    assert len(offloaded_parameters(model)) == on_disk
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), expected)
    theirs = PeftModel.from_pretrained(load(folder, device_map), adapter)
    assert torch.equal(logits(theirs), expected)
    assert len(offloaded_parameters(theirs)) == on_disk
    leases = leases_of(theirs.base_model.model)
    assert leases is None or leases.pool.lease_count == 0


def test_a_model_back_in_memory_can_be_moved_and_told_nothing(adapted):
    model = load(adapted[0], {"": "disk"})
    assert {"to", "cuda", "cpu", "load_adapter"} <= set(vars(model))
    plain = materialize(model)
    assert not {"to", "cuda", "cpu", "load_adapter", "hf_device_map"} & set(vars(plain))
    assert plain.to("meta").lm_head.weight.is_meta
