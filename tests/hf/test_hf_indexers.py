"""Attention to tokens that an index chooses, and layers whose keys and values are not of the size that is usual."""

import pytest
import torch
import transformers as hf
from models import SHAPE, build
from torch.utils import _pytree as pytree

from t2n_hf import export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.states import StateCache
from t2n_hf.hf.capturable.indexers import capturable_indexers
from t2n_hf.hf.tasks.layout import cache_layout, cache_names
from t2n_hf.tract.runner import TractRunner

CHOSEN = 6
IDS = torch.randint(3, 256, (1, 14), generator=torch.Generator().manual_seed(5))


def indexed():
    """DeepSeek V3.2: of all tokens before it each one sees the six that the index prefers."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    # Of many heads one at the least is above zero: tokens with equal scores are in no order.
    index = {"index_topk": CHOSEN, "index_head_dim": 16, "index_n_heads": 12}
    config = hf.DeepseekV32Config(**{**SHAPE, "num_key_value_heads": 4}, **latent, **index, first_k_dense_replace=2)
    return build(hf.DeepseekV32ForCausalLM, config)


def two_sizes():
    """MiMo-V2: layers with windows have more heads, and values another size than keys."""
    config = hf.MiMoV2FlashConfig(
        **SHAPE,
        head_dim=16,
        v_head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=16,
        swa_v_head_dim=8,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "dense"],
        sliding_window=8,
    )
    return build(hf.MiMoV2FlashForCausalLM, config)


def going_round():
    """Dory: goes twice through its second layer, which keeps keys and values of each time."""
    rounds = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 2}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    return build(hf.DoryForCausalLM, hf.DoryConfig(**{**SHAPE, **rounds}, head_dim=16, layer_types=kinds))


def check_steps(model, folder):
    """Compare calls of 9, 1 and 4 tokens with one of PyTorch over all of them, without a cache."""
    report = export_nnef(model, folder, format="dir", all_logits=True)
    assert report.check == "passed"
    truth = model(input_ids=IDS, use_cache=False).logits.detach()
    with TractRunner(folder / "model", timeout_s=240) as runner:
        feedback = {f"out_{name[3:]}": name for name in runner.inputs if name.startswith("in_")}
        for begin, end in ((0, 9), (9, 10), (10, 14)):
            got = torch.from_numpy(runner.step({"input_ids": IDS[:, begin:end].numpy()}, feedback)["outputs"])
            torch.testing.assert_close(got, truth[:, begin:end], rtol=0, atol=1e-4 * float(truth.abs().max()))


def test_an_index_keeps_keys_of_its_own_behind_those_of_attention():
    layout = cache_layout(indexed())
    assert cache_names(layout)[:3] == ["key_0", "value_0", "index_0"]
    assert layout[0].attention == ((1, 1, 0, 16), (1, 1, 0, 8), (1, 1, 0, 16))
    assert not layout[0].plain
    tensors = [torch.randn(1, 1, 3, shape[-1]) for states in layout for shape in states.attention]
    flat, structure = pytree.tree_flatten(StateCache(tensors, layout))
    assert all(torch.equal(one, other) for one, other in zip(flat, tensors, strict=True))
    again = pytree.tree_unflatten(flat, structure)
    grown = again.update_indexer(torch.ones(1, 2, 16), 1)
    assert torch.equal(grown[:, :3], tensors[5][:, 0])
    assert again.tensors()[5].shape == (1, 1, 5, 16)


def test_an_index_chooses_as_before_after_a_capture():
    model = indexed()
    indexer = model.model.layers[0].self_attn.indexer
    before = indexer.forward
    with capturable_indexers(model), torch.no_grad():
        assert indexer.forward.__func__ is not type(indexer).forward
        inside = model(input_ids=IDS, use_cache=False).logits
    assert indexer.forward == before
    torch.testing.assert_close(inside, model(input_ids=IDS, use_cache=False).logits)


@pytest.mark.tract
def test_tokens_that_an_index_chooses_are_seen_on_both_sides_of_its_number(tmp_path):
    check_steps(indexed(), tmp_path / "out")


@pytest.mark.tract
def test_layers_of_two_kinds_keep_keys_and_values_of_their_own_sizes(tmp_path):
    model = two_sizes()
    assert [states.attention for states in cache_layout(model)] == [
        ((1, 2, 0, 16), (1, 2, 0, 8)),
        ((1, 4, 0, 16), (1, 4, 0, 8)),
    ]
    check_steps(model, tmp_path / "out")


@pytest.mark.tract
def test_layers_that_are_gone_through_twice_keep_keys_and_values_of_each_time(tmp_path):
    model = going_round()
    assert cache_names(cache_layout(model))[-2:] == ["key_3", "value_3"]
    check_steps(model, tmp_path / "out")


def test_a_cache_that_may_hold_more_than_keys_and_values_is_refused():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    latent = {"q_lora_rank": 32, "qk_rope_head_dim": 8, "head_dim": 64, "o_groups": 2, "o_lora_rank": 16}
    index = {"index_topk": CHOSEN, "index_head_dim": 16, "index_n_heads": 4, "num_key_value_heads": 1}
    kinds = {"layer_types": ["heavily_compressed_attention"] * 2, "mlp_layer_types": ["moe"] * 2}
    config = hf.DeepseekV4Config(**{**SHAPE, **experts, **latent, **index, **kinds})
    with pytest.raises(ConfigError, match="layer 0 of DeepseekV4ForCausalLM keeps a DeepseekV4HCACache"):
        cache_layout(build(hf.DeepseekV4ForCausalLM, config))
