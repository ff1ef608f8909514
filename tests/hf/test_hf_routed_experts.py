"""Experts that models choose in loops, as they are captured, run in PyTorch: they give what transformers' own give."""

import pytest
import torch
import transformers as hf
from models import SHAPE, build

from t2n_hf import export_nnef
from t2n_hf.hf.capturable.routed_experts import capturable_experts

_SEQ2SEQ = {"vocab_size": 64, "d_model": 16, "decoder_start_token_id": 0, "num_experts": 4}


def switch(**changes):
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    sizes = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = hf.SwitchTransformersConfig(**{**_SEQ2SEQ, **sizes, **sparse, **changes})
    return build(hf.SwitchTransformersForConditionalGeneration, config)


def nllb(**changes):
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = hf.NllbMoeConfig(**{**_SEQ2SEQ, **layers, **heads, "max_position_embeddings": 64, **changes})
    return build(hf.NllbMoeForConditionalGeneration, config)


def jetmoe(**changes):
    heads = {"num_key_value_heads": 2, "kv_channels": 8}  # its attention has as many more as experts are chosen
    sizes = {**SHAPE, **heads, "num_hidden_layers": 1, "hidden_size": 32}
    del sizes["num_attention_heads"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return build(hf.JetMoeForCausalLM, hf.JetMoeConfig(**{**sizes, **experts, **changes}))


def dbrx(**changes):
    attention = {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, **changes}
    config = hf.DbrxConfig(
        d_model=32, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=64, attn_config=attention, ffn_config=experts
    )
    return build(hf.DbrxForCausalLM, config)


def longcat(**changes):
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3, "expert_ffn_hidden_size": 32, "head_dim": 8}
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    config = hf.LongcatFlashConfig(**{**sizes, **latent, **experts, "max_position_embeddings": 64, **changes})
    return build(hf.LongcatFlashForCausalLM, config)


MODELS = {"switch": switch, "nllb": nllb, "jetmoe": jetmoe, "dbrx": dbrx, "longcat": longcat}


def ids(batch, length, seed=0):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model, batch=3, length=11):
    given = {"input_ids": ids(batch, length)}
    if model.config.is_encoder_decoder:
        given |= {"attention_mask": torch.ones(batch, length), "decoder_input_ids": ids(batch, 5, seed=1)}
        given["attention_mask"][1:, 7:] = 0
    with torch.no_grad():
        return model(**given, use_cache=False if not model.config.is_encoder_decoder else None).logits


@pytest.mark.parametrize(
    "make",
    [
        switch,
        lambda: switch(expert_capacity=2, router_bias=True),
        nllb,
        lambda: nllb(expert_capacity=2, moe_token_dropout=0.0),
        lambda: nllb(normalize_router_prob_before_dropping=True, batch_prioritized_routing=True),
        jetmoe,
        lambda: jetmoe(num_experts_per_tok=1),
        dbrx,
        lambda: dbrx(moe_top_k=1),
        longcat,
        lambda: longcat(zero_expert_num=0),
    ],
    ids=[
        *("switch", "switch full", "nllb", "nllb full", "nllb sorted", "jetmoe", "jetmoe of one"),
        *("dbrx", "dbrx of one", "longcat", "longcat without idle ones"),
    ],
)
def test_experts_give_what_those_of_transformers_give(make):
    model = make()
    wanted = logits(model)
    with capturable_experts(model):
        got = logits(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_a_capacity_that_is_full_shows():
    assert not torch.allclose(logits(switch()), logits(switch(expert_capacity=2)), atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_before_after_a_capture_and_after_an_error_in_it(name):
    model = MODELS[name]()
    before = [dict(vars(module)) for module in model.modules()]

    def fail_in_a_capture():
        with capturable_experts(model):
            logits(model)
            assert any("forward" in vars(module) for module in model.modules())
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail_in_a_capture()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_router_does_not_change_the_type_of_its_weights_while_it_is_captured():
    router = switch().half().encoder.block[0].layer[-1].mlp.router
    with capturable_experts(router), torch.no_grad():
        chosen, weights, scores = router(torch.randn(1, 5, 16, dtype=torch.float16))
        assert router.classifier.weight.dtype == torch.float16
    assert (scores.dtype, weights.dtype, tuple(chosen.shape)) == (torch.float32, torch.float16, (1, 5, 4))


def switch_encoder():
    return build(hf.SwitchTransformersEncoderModel, switch().config)


@pytest.mark.tract
@pytest.mark.parametrize("make", [switch_encoder, jetmoe], ids=["switch", "jetmoe"])
def test_archives_of_models_with_routed_experts_are_right(make, tmp_path):
    assert export_nnef(make(), tmp_path / "out").check == "passed"


@pytest.mark.slow
@pytest.mark.tract
@pytest.mark.parametrize("name", ["switch", "nllb"])
def test_encoder_and_decoder_with_routed_experts_are_right(name, tmp_path):
    report = export_nnef(MODELS[name](), tmp_path / "out")
    assert report.check == "passed"
    assert set(report.archives) == {"encoder", "decoder"}
