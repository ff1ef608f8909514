"""Models with states as they are captured, run in PyTorch: in any spans they do what transformers does in one call."""

import pytest
import torch
import transformers as hf
from models import m1
from recurrent_models import RECURRENT, recurrent

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.states import LayerStates, StateCache, keeps_states, states_of
from t2n_hf.hf.capturable.recurrence import begins_anew, capturable_recurrences
from t2n_hf.hf.tasks import interface_of

IDS = torch.randint(3, 256, (2, 13), generator=torch.Generator().manual_seed(1))
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def nothing_seen(interface, rows=1):
    """Caches of a model that has seen nothing."""
    names = [name for name in interface.input_names if name.startswith("in_cache_")]
    caches = [torch.zeros(rows, *cache.shape[1:]) for cache in interface.args[1]]
    return [
        cache[:, :, :0] if name.split("_")[2] in ("key", "value") else cache
        for name, cache in zip(names, caches, strict=True)
    ]


def relative(got, wanted):
    return got / wanted.abs().max(), wanted / wanted.abs().max()


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_a_sequence_in_spans_gives_the_logits_of_the_whole(name):
    model = recurrent(name)
    wanted = model(input_ids=IDS[:1], use_cache=False).logits
    interface = interface_of(model, all_logits=True)
    caches, logits, at = nothing_seen(interface), [], 0
    with interface.context():
        for length in (6, 1, 4, 1, 1):
            result = interface.module(IDS[:1, at : at + length], caches)
            logits.append(result[0])
            caches = list(result[1:])
            at += length
    torch.testing.assert_close(*relative(torch.cat(logits, dim=1), wanted), **TOLERANCE)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "falcon_h1", "qwen3_next", "lfm2", "minimax"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing_in_its_row(name):
    model = recurrent(name)
    interface = interface_of(model, batch=True, mask=True)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    positions = [(mask.cumsum(1) - 1).clamp(min=0)] if "position_ids" in interface.input_names else []
    with interface.context():
        logits = interface.module(IDS, nothing_seen(interface, rows=2), mask, *positions)[0]
    alone = [model(input_ids=row, use_cache=False).logits[:, -1] for row in (IDS[:1], IDS[1:, 5:])]
    torch.testing.assert_close(*relative(logits[:, 0], torch.cat(alone)), **TOLERANCE)


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "qwen3_next", "minimax", "rwkv", "xlstm"])
def test_a_model_is_as_before_after_its_capture(name):
    model = recurrent(name)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with capturable_recurrences(model):
        assert any("forward" in vars(module) for module in model.modules())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_hooks_that_wrap_a_forward_are_put_back():
    model = recurrent("mamba")
    mixer = model.backbone.layers[0].mixer
    mixer.forward = wrapped = lambda *args, **kwargs: None
    with capturable_recurrences(model):
        assert mixer.forward is not wrapped
    assert mixer.forward is wrapped


def test_layers_of_a_class_share_their_function():
    model = recurrent("mamba2")
    with capturable_recurrences(model):
        first, second = (layer.mixer.forward.__func__ for layer in model.backbone.layers)
    assert first is second


def test_only_scans_without_a_beginning_begin_anew():
    assert begins_anew(recurrent("jamba"))
    assert not begins_anew(recurrent("mamba2"))
    assert not begins_anew(m1())


def test_shapes_of_states_are_found_without_values():
    model = recurrent("falcon_h1")
    (first, _) = states_of(model)
    assert first.attention == ((1, 2, 0, 16), (1, 2, 0, 16))
    assert [name for name, _ in first.named()] == ["key", "value", "conv", "state"]
    assert dict(first.named())["state"] == (1, 8, 16, 16)
    assert list(first.grows()) == [True, True, False, False]


def test_layers_without_a_cache_have_no_tensors():
    model = recurrent("nemotron_h")
    assert keeps_states(model)
    names = interface_of(model).input_names
    assert names == ("input_ids", "in_cache_conv_0", "in_cache_state_0", "in_cache_key_1", "in_cache_value_1")


def test_a_model_of_attention_alone_keeps_keys_and_values():
    assert not keeps_states(m1())


def test_a_model_without_a_past_has_no_past_length_and_no_scenario():
    interface = interface_of(recurrent("mamba"))
    assert interface.asserts == ("S >= 1",)


def test_a_cache_of_another_number_of_tensors_is_refused():
    with pytest.raises(ConfigError, match="got 1 tensors for a cache of 2 in 1 layers"):
        StateCache([torch.zeros(1, 2, 0, 4)], [LayerStates(((1, 2, 0, 4), (1, 2, 0, 4)))])


def test_a_cache_survives_being_taken_apart():
    layout = states_of(recurrent("falcon_h1"))
    tensors = [torch.randn(1, *shape[1:]) for states in layout for _, shape in states.named()]
    cache = StateCache(tensors, layout)
    leaves, spec = torch.utils._pytree.tree_flatten(cache)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert again.layout == cache.layout
    assert all(a is b for a, b in zip(again.tensors(), tensors, strict=True))


def test_options_of_generation_are_refused_for_other_tasks():
    model = hf.BertForMaskedLM(
        hf.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(ConfigError, match="batch and mask are for text-generation"):
        interface_of(model, batch=True)


@torch.no_grad()
def test_a_mask_of_another_length_is_refused():
    interface = interface_of(m1(), mask=True)
    with pytest.raises(ConfigError, match="a mask of 4 for 13 tokens after 0"):
        interface.module(IDS[:1], nothing_seen(interface), torch.ones(1, 4, dtype=torch.int64))
