"""Attention and forwards of a user's own, in models of transformers."""

from types import MethodType

import models
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, eager_attention_forward

from t2n_hf.hf.tasks import interface_of
from t2n_hf.trace.capture import capture


def sharper_at_last(module, query, key, value, mask, scaling, **kwargs):
    scaling = scaling * 3 if module.layer_idx == 2 else scaling
    return eager_attention_forward(module, query, key, value, mask, scaling, **kwargs)


def smaller_at_last(mlp, x):
    return LlamaMLP.forward(mlp, x) * (0.5 if mlp.layer_idx == 2 else 1)


@pytest.fixture
def own_attention(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sharper", sharper_at_last)
    eager = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sharper", eager)


def kinds_of(model):
    captured = capture(interface_of(model), torch.float32, "pieces")
    return [call.piece for call in captured.calls.values()]


@pytest.mark.usefixtures("own_attention")
def test_attention_of_ones_own_is_captured_and_may_tell_layers_apart():
    model = models.m1(num_hidden_layers=3)
    model.set_attn_implementation("sharper")
    assert kinds_of(model) == [0, 0, 1]
    assert model.config._attn_implementation == "sharper"


def test_a_forward_of_ones_own_may_tell_layers_apart():
    model = models.m1(num_hidden_layers=3)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx = number
        layer.mlp.forward = MethodType(smaller_at_last, layer.mlp)
    assert kinds_of(model) == [0, 0, 1]


def test_other_attention_of_transformers_is_captured_as_sdpa():
    model = models.m1()
    before = len(kinds_of(model))
    model.config._attn_implementation = "flex_attention"
    assert len(kinds_of(model)) == before
    assert model.config._attn_implementation == "flex_attention"
