"""Matrices that are quantized when they are read: the same values, errors and archives as when a model is loaded."""

import models
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from t2n_hf.hf.late import LateContent
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.hf.sources import MappedPages
from t2n_hf.tensor import OffloadedTensor


def is_late(parameter):
    return isinstance(parameter, OffloadedTensor) and isinstance(parameter.source.content, LateContent)


def late_names(model):
    return [name for name, parameter in model.named_parameters() if is_late(parameter)]


def packed_parts(parameter):
    state = parameter.stored_state()
    return None if state is None else (state["tag"], state["meta"], state["tensors"])


def same_weights(one, other):
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        if not isinstance(theirs, OffloadedTensor) or theirs.inner_class is None:
            continue
        assert ours.inner_class is theirs.inner_class, name
        assert ours.nbytes_loaded == theirs.nbytes_loaded, name
        (tag, meta, parts), (wanted_tag, wanted_meta, wanted) = packed_parts(ours), packed_parts(theirs)
        assert (tag, meta, parts.keys()) == (wanted_tag, wanted_meta, wanted.keys()), name
        assert all(torch.equal(part, wanted[key]) for key, part in parts.items()), name


def with_dtype(folder, dtype):
    file = folder / "model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("late", ["once", "always"])
@pytest.mark.parametrize("make", [models.m1, models.m2, models.m4, models.m5, models.m10], ids=lambda m: m.__name__)
def test_weights_are_those_of_a_model_that_was_quantized_while_loading(make, late, tmp_path):
    folder = models.saved(make(), tmp_path)
    options = {"weights": "q4_0", "embeddings": "q4_0"}
    same_weights(load_checkpoint(folder, late=late, **options), load_checkpoint(folder, **options))


@pytest.mark.parametrize("weights", ["q4_0", "q8_1", "ternary"])
def test_every_class_that_keeps_rows_apart_is_quantized_when_it_is_read(weights, tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    late = load_checkpoint(folder, weights=weights, late="always")
    assert len(late_names(late)) == 14
    same_weights(late, load_checkpoint(folder, weights=weights))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_rounded_as_loading_does(stored, dtype, tmp_path):
    folder = with_dtype(models.saved(models.m2(), tmp_path), stored)
    late = load_checkpoint(folder, weights="q4_0", dtype=dtype, late="always")
    assert len(late_names(late)) == 14
    same_weights(late, load_checkpoint(folder, weights="q4_0", dtype=dtype))


def test_pages_that_the_loader_read_are_given_back_and_no_others_are(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(MappedPages, "used", lambda self, nbytes: used.append(nbytes))
    folder = with_dtype(models.saved(models.m1(), tmp_path), torch.bfloat16)
    options = {"weights": "q4_0", "embeddings": "q4_0", "late": "always"}
    for dtype in (torch.bfloat16, torch.float32):
        model = load_checkpoint(folder, dtype=dtype, **options)
        matrices = [weight for weight in model.parameters() if is_late(weight)]
        assert len(matrices) == 15
        cast = [] if dtype is torch.bfloat16 else [weight.numel() * 4 for weight in matrices]
        assert sorted(used) == sorted(cast)
        used.clear()


def test_a_large_matrix_is_quantized_in_steps(tmp_path):
    config = hf.LlamaConfig(**{**models.SHAPE, "num_hidden_layers": 1, "intermediate_size": 40_000})
    folder = models.saved(models.build(hf.LlamaForCausalLM, config), tmp_path)
    same_weights(load_checkpoint(folder, weights="q4_0", late="once"), load_checkpoint(folder, weights="q4_0"))


def test_without_late_or_in_memory_weights_are_quantized_while_loading(tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    assert late_names(load_checkpoint(folder, weights="q4_0")) == []
    assert late_names(load_checkpoint(folder, weights="q4_0", late="always", device_map=None)) == []


def test_what_was_read_once_is_kept_and_needs_the_checkpoint_no_more(tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    kept = load_checkpoint(folder, weights="q4_0", late="once")
    name = "model.layers.0.mlp.up_proj.weight"
    (_, _, first), weight = packed_parts(kept.get_parameter(name)), kept.get_parameter(name)
    (folder / "model.safetensors").write_bytes(b"gone")
    (_, _, again) = packed_parts(weight)
    assert torch.equal(first["q4_0"], again["q4_0"])
    dense = weight.reload().to_base_tensor()
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([3, 1]), weight), dense[[3, 1]])


def test_a_model_that_quantizes_late_computes_the_same(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    options = {"weights": "q4_0", "embeddings": "q4_0"}
    found, wanted = (
        load_checkpoint(folder, **options, **late)(models.prompt()).logits for late in ({"late": "always"}, {})
    )
    assert torch.equal(found, wanted)
