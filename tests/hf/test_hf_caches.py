import pytest
import torch
import transformers
from torch.utils import _pytree as pytree
from transformers import DynamicCache

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.whole import CacheShape, WholeCache, cache_parameter, cache_shapes
from t2n_hf.trace.layers import bind, register_leaf_setter

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
}
SMALL = {"vocab_size": 64, "pad_token_id": 0}
GROUPED = {**BASE, "num_key_value_heads": 2}
GPT = {**SMALL, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {**SMALL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
MODELS = {
    "llama": ("Llama", GROUPED),
    "head-dim-of-its-own": ("Qwen3", {**GROUPED, "head_dim": 32}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "sliding": ("Mistral", {**GROUPED, "sliding_window": 3}),
    "gpt2": ("GPT2", GPT),
    "one-key-head": ("GPTBigCode", GPT),
    "gpt-neox": ("GPTNeoX", BASE),
    "phi3": ("Phi3", GROUPED),
    "multi-query": ("Falcon", FALCON),
    "falcon-groups": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "latent": ("DeepseekV3", LATENT),
}


def tiny(family, options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    return getattr(transformers, name)(config).eval()


def tensors(layers=2, past=3):
    return [torch.randn(1, 2, past, 4) for _ in range(2 * layers)]


@pytest.mark.parametrize(("family", "options"), MODELS.values(), ids=MODELS)
def test_shapes_from_the_config_are_those_that_the_model_caches(family, options):
    model = tiny(family, options)
    cache = model(input_ids=torch.ones(1, 2, dtype=torch.int64), use_cache=True)["cache"]
    found = cache_shapes(model.config)
    assert [s.key(2) for s in found] == [tuple(layer.keys.shape) for layer in cache.layers]
    assert [s.value(2) for s in found] == [tuple(layer.values.shape) for layer in cache.layers]


@pytest.mark.parametrize(("family", "options"), MODELS.values(), ids=MODELS)
def test_a_whole_cache_continues_like_the_models_own(family, options):
    model = tiny(family, options)
    ids = torch.randint(1, 64, (1, 9))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, 5:]
        name = cache_parameter(model.forward)
        empty = [torch.zeros(side(0)) for s in cache_shapes(model.config) for side in (s.key, s.value)]
        cache = WholeCache(empty)
        model(input_ids=ids[:, :5], **{name: cache}, use_cache=True)
        again = WholeCache(cache.tensors())
        logits = model(input_ids=ids[:, 5:], **{name: again}, use_cache=True).logits
    assert cache.get_seq_length() == 5
    assert again.get_seq_length() == 9
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_another_state_is_refused_by_kind():
    config = transformers.Qwen3NextConfig(**GROUPED, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="linear_attention"):
        cache_shapes(config)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ConfigError, match="no attention heads"):
        cache_shapes(transformers.MambaConfig(hidden_size=64, num_hidden_layers=2))


def test_keys_and_values_may_differ_in_shape():
    shape = CacheShape(1, 16, 2, 8)
    assert shape.key(3) == (1, 1, 3, 16)
    assert shape.value(3) == (1, 2, 3, 8)


def test_an_odd_number_of_tensors_is_refused():
    with pytest.raises(ConfigError, match="got 3 tensors"):
        WholeCache(tensors()[:3])


def test_a_cache_flattens_to_its_tensors_and_back():
    given = tensors()
    leaves, spec = pytree.tree_flatten({"cache": WholeCache(given), "other": 1})
    assert all(a is b for a, b in zip(leaves, given, strict=False))
    back = pytree.tree_unflatten(leaves, spec)["cache"]
    assert isinstance(back, WholeCache)
    assert all(a is b for a, b in zip(back.tensors(), given, strict=True))
    assert len(pytree.tree_flatten_with_path(WholeCache(given))[0]) == 4


def test_an_empty_past_has_length_zero():
    assert WholeCache(tensors(past=0)).get_seq_length() == 0


def test_the_cache_parameter_is_found_by_annotation_then_by_name():
    def annotated(input_ids, memory: "DynamicCache | None" = None):
        pass

    def named(input_ids, past_key_values=None):
        pass

    def neither(input_ids):
        pass

    assert cache_parameter(annotated) == "memory"
    assert cache_parameter(named) == "past_key_values"
    assert cache_parameter(neither) is None


def test_leaves_of_a_whole_cache_are_replaced_one_by_one():
    from_layers = torch.arange(6.0).reshape(6, 1, 1, 1, 1)
    cache = WholeCache(list(from_layers))
    layers = list(cache.layers)
    new = {1: torch.ones(1, 1, 2, 1), 4: torch.zeros(1, 1, 2, 1)}
    arguments = bind(Given(), (cache,), {}, "a layer")
    arguments.replace(new)
    assert cache.tensors()[1] is new[1]
    assert cache.tensors()[4] is new[4]
    assert [float(tensor) for at, tensor in enumerate(cache.tensors()) if at not in new] == [0.0, 2.0, 3.0, 5.0]
    assert all(mine is other for mine, other in zip(cache.layers, layers, strict=True))


def test_a_class_has_one_way_to_replace_leaves():
    with pytest.raises(ValueError, match="WholeCache"):
        register_leaf_setter(WholeCache, lambda _cache, _tensors: None)


class Given(torch.nn.Module):
    def forward(self, cache):
        return cache
