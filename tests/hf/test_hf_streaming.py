"""Weights for which there is no room pass through memory a few rows at a time, and compute the same numbers."""

import models
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from t2n_hf import T2NConfig
from t2n_hf.errors import StorageError
from t2n_hf.hf.hooks import leases_of
from t2n_hf.residency import stream

SLOT = 1 << 16


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(stream, "_SLOT_NBYTES", SLOT)
    monkeypatch.setattr(stream, "STREAM_NBYTES", SLOT * 4)
    monkeypatch.setattr(stream, "_LEAST_BUDGET", SLOT * 6)


def llama(dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=700,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def on_disk(model, folder, budget=1_100_000):
    return LlamaForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        device_map={"": "disk"},
        quantization_config=T2NConfig("none", max_resident_bytes=budget * model.dtype.itemsize),
    )


def logits(model, length, seed=0):
    ids = torch.randint(3, 900, (2, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(ids).logits


def passing(model):
    return leases_of(model).pool._stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_numbers_are_those_of_the_dense_model_bit_for_bit(dtype, bias, tmp_path):
    folder = models.saved(llama(dtype, attention_bias=bias, mlp_bias=bias), tmp_path)
    dense = LlamaForCausalLM.from_pretrained(folder, dtype="auto")  # whose rotary frequencies are f32
    model = on_disk(dense, folder)
    for length in (1, 1, 5, 40, 1):
        assert torch.equal(logits(model, length), logits(dense, length))
    assert passing(model)._slots, "nothing passed"
    pool = leases_of(model).pool
    assert pool.peak_bytes <= pool.max_cached_bytes


def test_gradients_of_inputs_are_those_of_the_dense_model(tmp_path):
    dense = llama()
    model = on_disk(dense, models.saved(dense, tmp_path))
    logits(model, 3)
    logits(model, 3)
    found = []
    for one in (model, dense):
        x = torch.randn(1, 4, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
        one(inputs_embeds=x).logits.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_inference_mode_leaves_nothing_behind(tmp_path):
    dense = llama()
    model = on_disk(dense, models.saved(dense, tmp_path))
    with torch.inference_mode():
        ids = torch.randint(3, 900, (1, 4))
        for _ in range(3):
            model(ids)
    assert passing(model)._slots
    x = torch.randn(1, 4, 256).requires_grad_()
    model(inputs_embeds=x).logits.sum().backward()
    assert x.grad is not None


def test_a_file_that_was_truncated_is_an_error_and_later_fine_again(tmp_path):
    dense = llama()
    folder = models.saved(dense, tmp_path)
    model = on_disk(dense, folder)
    logits(model, 2)
    logits(model, 2)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(whole) // 2)
    with pytest.raises(StorageError, match=r"changed since it was opened|truncated"):
        logits(model, 2)
    path.write_bytes(whole)
    assert torch.equal(logits(model, 2), logits(dense, 2))
    assert leases_of(model).pool.lease_count == 0


def test_what_is_written_to_a_weight_is_seen(tmp_path):
    dense = llama()
    model = on_disk(dense, models.saved(dense, tmp_path))
    logits(model, 2)
    logits(model, 2)
    for one in (model, dense):
        with torch.no_grad():
            for layer in one.model.layers:
                layer.mlp.up_proj.weight.mul_(0.5)
    assert torch.equal(logits(model, 2), logits(dense, 2))


def test_generating_reads_what_is_not_kept_once_a_token(tmp_path):
    dense = llama()
    model = on_disk(dense, models.saved(dense, tmp_path))
    ids = torch.randint(3, 900, (1, 4))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    pool = leases_of(model).pool
    kept = {entry.key for entry in pool._table.entries.values()}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    assert {entry.key for entry in pool._table.entries.values()} == kept
