"""Decoders with a cache of their own kind (RWKV, MiniMax, xLSTM), captured and as transformers runs them."""

import pytest
import torch
import transformers as hf
from models import build
from recurrent_models import WITHOUT_MASK, recurrent

from t2n_hf.errors import ConfigError
from t2n_hf.hf.capturable.recurrence import capturable_recurrences
from t2n_hf.hf.capturable.rwkv import unscaled_rwkv
from t2n_hf.hf.tasks import interface_of

NAMES = ("rwkv", "minimax", "xlstm")
IDS = torch.randint(3, 256, (3, 13), generator=torch.Generator().manual_seed(1))
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def nothing_seen(interface, rows):
    """Caches of a model that has seen nothing."""
    shapes = [(rows, *cache.shape[1:]) for cache in interface.args[1]]
    names = [name for name in interface.input_names if name.startswith("in_cache_")]
    return [
        torch.zeros(*shape[:2], 0, *shape[3:]) if name.split("_")[2] in ("key", "value") else torch.zeros(shape)
        for name, shape in zip(names, shapes, strict=True)
    ]


def in_spans(module, ids, caches, spans=(6, 1, 4, 1, 1)):
    logits, at = [], 0
    for length in spans:
        result, *caches = module(ids[:, at : at + length], caches)
        logits.append(result)
        at += length
    return torch.cat(logits, dim=1), caches


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_an_archive_is_checked_with_gives_what_one_call_over_the_whole_text_gives(name):
    """The reference runs the model's own code, by spans and for several sequences at once."""
    model = recurrent(name)
    interface = interface_of(model, all_logits=True, batch=True)
    wanted = model(input_ids=IDS, use_cache=False).logits
    got, _ = in_spans(interface.module, IDS, nothing_seen(interface, 3))
    torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_states_after_a_text_are_those_that_the_model_itself_keeps(name):
    model = recurrent(name)
    interface = interface_of(model, all_logits=True, batch=True)
    _, wanted = in_spans(interface.module, IDS, nothing_seen(interface, 3), (13,))
    with interface.context():
        _, got = in_spans(interface.module, IDS, nothing_seen(interface, 3))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@torch.no_grad()
def test_a_state_of_zeros_has_seen_nothing_however_small_the_first_weights_are():
    """exp(-200) is 0 in f32: a state whose largest exponent were 0 would divide by it."""
    model = recurrent("rwkv")
    for block in model.rwkv.blocks:
        block.attention.time_first.fill_(-200.0)
    interface = interface_of(model, all_logits=True)
    wanted = model(input_ids=IDS[:1], use_cache=False).logits
    with interface.context():
        got, _ = in_spans(interface.module, IDS[:1], nothing_seen(interface, 1))
    torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), **TOLERANCE)


@torch.no_grad()
def test_rwkv_runs_undivided_to_the_same_numbers():
    model, divided = recurrent("rwkv"), recurrent("rwkv")
    wanted = divided(input_ids=IDS, use_cache=False).logits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.equal(
        before["rwkv.blocks.2.attention.output.weight"], divided.rwkv.blocks[2].attention.output.weight
    )
    with unscaled_rwkv(model):
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, wanted)
    assert not model.rwkv.layers_are_rescaled
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with unscaled_rwkv(divided):
        assert torch.equal(divided(input_ids=IDS, use_cache=False).logits, wanted)


@torch.no_grad()
def test_rwkv_may_be_captured_with_the_list_that_it_makes_itself():
    model = recurrent("rwkv")
    wanted = model(input_ids=IDS, use_cache=False).logits
    with capturable_recurrences(model):
        first = model(input_ids=IDS[:, :8], use_cache=True)
        second = model(input_ids=IDS[:, 8:], state=first.state, use_cache=True)
    got = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), **TOLERANCE)


@torch.no_grad()
def test_a_text_longer_than_xlstm_runs_at_once_is_captured_in_one_walk():
    config = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 4}
    model = build(hf.xLSTMForCausalLM, hf.xLSTMConfig(**config, max_inference_chunksize=5))
    whole = build(hf.xLSTMForCausalLM, hf.xLSTMConfig(**config))
    wanted = whole(input_ids=IDS, use_cache=False).logits
    interface = interface_of(model, all_logits=True, batch=True)
    with interface.context():
        got, _ = in_spans(interface.module, IDS, nothing_seen(interface, 3), (13,))
    torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), **TOLERANCE)
    assert model.config.max_inference_chunksize == 5


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_a_mask_that_has_no_effect_is_refused(name):
    with pytest.raises(ConfigError, match="has no use for an attention_mask"):
        interface_of(recurrent(name), mask=True)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("rwkv", "conv_0 conv_1_0 state_0 state_1_0 state_2_0 conv_1"),
        ("minimax", "state_0 key_1 value_1"),
        ("xlstm", "state_0 state_1_0 state_2_0 state_1 state_1_1 state_2_1"),
    ],
)
def test_states_are_inputs_named_by_layer(name, inputs):
    wanted = [f"in_cache_{part}" for part in inputs.split()]
    assert list(interface_of(recurrent(name)).input_names)[1 : 1 + len(wanted)] == wanted


def test_a_model_whose_state_does_not_grow_runs_on_and_on():
    """RWKV's config names the length of the texts that it learned from."""
    model = recurrent("rwkv")
    assert model.config.context_length == 1024
    interface = interface_of(model)
    assert (interface.asserts, interface.extra["max_context"]) == (("S >= 1",), None)
    assert interface_of(model, max_context=2048).extra["max_context"] == 2048
    assert interface_of(recurrent("minimax")).extra["max_context"] == 128


def test_a_model_without_a_cache_that_generates_in_a_way_of_its_own_is_refused():
    """XLNet generates with a token more than the text has, and an order of the tokens."""
    config = hf.XLNetConfig(vocab_size=256, d_model=64, n_layer=2, n_head=4, d_inner=128)
    with pytest.raises(ConfigError, match=r"generate\(\) gives it something else than the tokens"):
        interface_of(hf.XLNetLMHeadModel(config))
