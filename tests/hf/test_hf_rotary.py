import pytest
import torch
import transformers
from models import m1, m6

from t2n_hf.errors import ConfigError
from t2n_hf.hf.capturable.rotary import capturable_rotary, rope_switch
from t2n_hf.hf.tasks import interface_of

LLAMA_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def ids(length):
    return torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(length))


def louder(model):
    # The usual initialisation is so quiet that wrong frequencies hardly show.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    return model


def exported(model):
    interface = interface_of(model)
    with interface.context():
        program = torch.export.export(
            interface.module, interface.args, dynamic_shapes=interface.dynamic_shapes, strict=False
        )
    empty = [cache[:, :, :0] for cache in interface.args[1]]
    return lambda tokens: program.module()(tokens, empty)[0]


@pytest.mark.parametrize("length", [31, 32, 33, 64])
@torch.no_grad()
def test_longrope_is_right_on_both_sides_of_its_switch(length):
    model = louder(m6())
    expected = model(input_ids=ids(length), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(exported(model)(ids(length)), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_two_sides_of_the_switch_differ_so_that_the_test_above_says_something():
    model = louder(m6())
    right = model(input_ids=ids(33)).logits
    rotary = model.model.rotary_emb
    rotary.rope_type, rotary.inv_freq = "default", rotary.original_inv_freq
    assert (model(input_ids=ids(33)).logits - right).abs().max() > 1e-2


@torch.no_grad()
def test_a_model_that_ran_beyond_the_switch_is_captured_with_both_sides():
    model = louder(m6())
    model(input_ids=ids(50))
    run = exported(model)
    for length in (10, 50):
        expected = model(input_ids=ids(length), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(run(ids(length)), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_dynamic_scaling_is_captured_at_the_frequencies_of_the_trained_length():
    model = louder(m1(rope_parameters=LLAMA_DYNAMIC, max_position_embeddings=64))
    model(input_ids=ids(100))  # grows the frequencies
    run = exported(model)
    expected = model(input_ids=ids(60), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(run(ids(60)), expected, rtol=1e-4, atol=1e-4)


def test_everything_is_put_back_even_after_an_error():
    model = m6()
    rotary = model.model.rotary_emb
    before = (rotary.rope_type, rotary.inv_freq)

    def fail():
        assert model.model.rotary_emb is not rotary
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), capturable_rotary(model):
        fail()
    assert model.model.rotary_emb is rotary
    assert (rotary.rope_type, rotary.inv_freq) == before


def test_the_switch_is_told_from_the_config():
    assert rope_switch(m6().config) == 32
    assert rope_switch(m1().config) is None
    nested = transformers.LlamaConfig()
    nested.rope_parameters = {"full": {"rope_type": "longrope", "original_max_position_embeddings": 7}, "x": None}
    assert rope_switch(nested) == 7


def test_scaling_by_length_per_kind_of_layer_is_refused():
    model = m1()
    model.model.rotary_emb.rope_type = {"full_attention": "longrope"}
    with pytest.raises(ConfigError, match="per kind of layer"), capturable_rotary(model):
        pass
