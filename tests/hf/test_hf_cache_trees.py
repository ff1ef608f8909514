import models
import pytest
import torch
import transformers as hf
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.hf.caches.trees import register_cache_trees
from t2n_hf.trace import deserialize_args, make_copy, serialize_args, type_as_str_with_info

LINEAR = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR |= {"shared_expert_intermediate_size": 16}


def qwen3_next():
    return models.build(hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(**{**models.SHAPE, **LINEAR}))


CACHES = {
    "dynamic": (models.m1, lambda config: DynamicCache()),
    "by config": (models.m1, lambda config: DynamicCache(config=config)),
    "sliding": (models.m5, lambda config: DynamicCache(config=config)),
    "static": (models.m1, lambda config: StaticCache(config=config, max_cache_len=16)),
    "static sliding": (models.m5, lambda config: StaticCache(config=config, max_cache_len=16)),
    "linear attention": (qwen3_next, lambda config: DynamicCache(config=config)),
}


def journey(cache):
    leaves, _ = serialize_args((cache,), None, schema="")
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    kind = type_as_str_with_info(cache)
    (back,) = deserialize_args(leaves, [kind], clone=True)
    assert type(back) is type(cache)
    assert type_as_str_with_info(back) == kind
    return back


@pytest.mark.parametrize("name", CACHES)
def test_a_model_goes_on_with_a_cache_that_was_flat_in_between(name):
    make, new = CACHES[name]
    model = make()
    cache = new(model.config)
    tokens = torch.arange(24).reshape(1, 24) % 250
    with torch.inference_mode():
        model(tokens[:, :10], cache=cache)
        other = journey(cache)
        want = [model(tokens[:, at : at + 1], cache=cache).logits for at in range(10, 14)]
        got = [model(tokens[:, at : at + 1], cache=other).logits for at in range(10, 14)]
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert journey(other).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_nothing_was_put_into_comes_back(name):
    make, new = CACHES[name]
    model = make()
    back = journey(new(model.config))
    tokens = torch.arange(5)[None]
    with torch.inference_mode():
        got = model(tokens, cache=back).logits
        assert torch.equal(got, model(tokens, cache=new(model.config)).logits)


def test_caches_of_encoder_decoders_come_back():
    shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = hf.BartConfig(
        vocab_size=256, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, **shape
    )
    model = models.build(hf.BartForConditionalGeneration, config)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    source, tokens = torch.arange(3, 12)[None], torch.arange(20, 26)[None]
    with torch.inference_mode():
        model(source, decoder_input_ids=tokens[:, :4], cache=cache)
        other = journey(cache)
        assert other.is_updated == {0: True, 1: True}
        want = model(source, decoder_input_ids=tokens[:, 4:5], cache=cache).logits
        got = model(source, decoder_input_ids=tokens[:, 4:5], cache=other).logits
    assert torch.equal(got, want)


def test_structures_differ_exactly_when_caches_differ_in_more_than_tensors():
    keys = torch.randn(1, 2, 3, 4)

    def cache(length):
        made = DynamicCache()
        made.update(keys[:, :, :length], keys[:, :, :length], 0)
        return made

    assert type_as_str_with_info(cache(2)) == type_as_str_with_info(cache(3))
    longer = cache(2)
    longer.update(keys, keys, 1)
    assert type_as_str_with_info(longer) != type_as_str_with_info(cache(2))


def test_a_copy_of_a_cache_has_tensors_of_its_own():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    copied = make_copy(cache)
    copied.layers[0].keys.zero_()
    assert torch.equal(cache.layers[0].keys, torch.ones(1, 1, 2, 2))


def test_a_class_that_is_defined_later_is_registered_by_the_next_call():
    class Late(DynamicCache):
        pass

    with pytest.raises(ConfigError, match="not a pytree"):
        type_as_str_with_info(Late())
    register_cache_trees()
    register_cache_trees()
    assert isinstance(pytree.tree_map(lambda leaf: leaf, DynamicCache()), DynamicCache)
    with pytest.raises(FormatError, match="no cache"):  # a class that no module shows cannot be found by its name
        pytree.tree_map(lambda leaf: leaf, Late())


def test_a_cache_with_parts_that_have_no_structure_is_refused_by_name():
    cache = DynamicCache(offloading=True) if torch.cuda.is_available() else DynamicCache()
    cache.stream = object()
    with pytest.raises(ConfigError, match=r"DynamicCache\.(prefetch_)?stream is a"):
        type_as_str_with_info(cache)


def test_a_cache_is_an_argument_of_torch_export():
    class Grown(torch.nn.Module):
        def forward(self, x, cache):
            keys, _values = cache.update(x, x, 0)
            return keys.sum(), cache

    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    exported = torch.export.export(Grown(), (torch.ones(1, 1, 1, 2), make_copy(cache)), strict=False)
    total, grown = exported.module()(torch.full((1, 1, 1, 2), 2.0), make_copy(cache))
    assert (total.item(), grown.get_seq_length()) == (8.0, 3)
