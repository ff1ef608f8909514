import json

import models
import pytest
import torch
from torch import nn

from t2n_hf import T2NConfig, materialize
from t2n_hf.hf.hooks import leases_of
from t2n_hf.tensor.opaque import OpaqueTensor


def load(model, folder, quantization=None, **options):
    return type(model).from_pretrained(folder, dtype="auto", quantization_config=quantization, **options)


def logits(model, length=12):
    with torch.no_grad():
        return model(models.prompt(length)).logits


@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["memory", "disk"])
def test_a_materialized_model_is_a_plain_one(name, device_map, tmp_path):
    source = getattr(models, name)()
    quantization = T2NConfig(embeddings="q4_0")
    packed = load(source, models.saved(source, tmp_path), quantization, device_map=device_map)
    expected = logits(packed)
    leases = leases_of(packed)
    assert materialize(packed) is packed
    assert all(type(p) is nn.Parameter for p in packed.parameters())
    assert packed.get_output_embeddings().weight is packed.get_input_embeddings().weight or name == "m4"
    torch.testing.assert_close(logits(packed.to("cpu")), expected, atol=1e-4, rtol=1e-4)
    assert leases_of(packed) is None
    assert leases is None or leases.pool.closed
    folder = models.saved(packed, tmp_path)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not (folder / "README.md").exists()
    assert torch.equal(logits(load(source, folder, experts_implementation="eager")), logits(packed))
    packed.half()
    assert packed.dtype == torch.float16


def test_dequantize_of_transformers_does_the_same(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    expected = logits(packed)
    plain = packed.dequantize()
    assert not any(isinstance(p, OpaqueTensor) for p in plain.parameters())
    torch.testing.assert_close(logits(plain), expected, atol=1e-4, rtol=1e-4)


def test_a_plain_model_stays_as_it_is():
    model = models.m1()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    materialize(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:.*(tie_word_embeddings|gradient checkpointing|Merge).*:UserWarning"
)
@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["memory", "disk"])
def test_a_model_inside_of_another_becomes_plain_with_it(device_map, tmp_path):
    peft = pytest.importorskip("peft")
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(), device_map=device_map)
    leases = leases_of(packed)
    rules = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(packed, rules).eval()
    expected = logits(adapted)
    assert materialize(adapted) is adapted
    assert leases is None or leases.pool.closed
    assert not {"_t2n_leases", "hf_quantizer", "hf_device_map", "save_pretrained", "to"} & vars(packed).keys()
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    again = load(source, models.saved(merged, tmp_path))
    assert torch.equal(logits(again), logits(merged))
