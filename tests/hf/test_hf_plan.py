import warnings

import models
import pytest
import torch

from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.plan import make_plan, matches, tied_groups

Q = "model.layers.0.self_attn.q_proj.weight"


def quantized(plan):
    return {name for name, choice in plan.items() if choice.format is not None}


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("mlp", "model.layers.0.mlp.up_proj.weight", True),
        ("mlp", "model.layers.0.mlp_norm.weight", False),
        ("layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("model.layers", "submodel.layers.0.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("a.b", "axb.weight", False),
    ],
)
def test_names_match_at_dots_only(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_none_leaves_out_what_transformers_does():
    plan = make_plan(models.m2(), T2NConfig())
    assert quantized(plan) == {
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    }


def test_an_empty_list_leaves_out_nothing_but_embeddings_and_head():
    import transformers as hf

    config = hf.LlamaConfig(**{**models.SHAPE, "num_labels": 32})
    model = models.build(hf.LlamaForSequenceClassification, config)
    assert "score.weight" not in quantized(make_plan(model, T2NConfig()))
    assert "score.weight" in quantized(make_plan(model, T2NConfig(modules_to_not_convert=[])))
    assert "model.embed_tokens.weight" not in quantized(make_plan(model, T2NConfig(modules_to_not_convert=[])))


def test_a_list_leaves_out_exactly_what_it_names():
    plan = make_plan(models.m1(), T2NConfig(modules_to_not_convert=["q_proj", "layers.1"]))
    left = quantized(plan)
    assert len(left) == 6
    assert plan[Q].reason == "modules_to_not_convert names 'q_proj'"


def test_a_name_that_matches_nothing_is_warned_about():
    with pytest.warns(UserWarning, match="'q_prj'"):
        make_plan(models.m1(), T2NConfig(modules_to_not_convert=["q_prj", "mlp"]))


@pytest.mark.parametrize(
    "options",
    [{"embeddings": "q4_0"}, {"lm_head": "q4_0"}, {"embeddings": "q4_0", "lm_head": "t2n_hf.q4_0.v1"}],
    ids=["embeddings", "head", "both"],
)
def test_a_tied_table_follows_the_choice_that_is_made(options):
    plan = make_plan(models.m1(), T2NConfig(**options))
    assert plan["model.embed_tokens.weight"].format is plan["lm_head.weight"].format is not None


def test_two_choices_for_one_table_are_refused():
    with pytest.raises(ConfigError, match=r"embeddings='none' and lm_head='q4_0'.*one tied table"):
        make_plan(models.m1(), T2NConfig(embeddings="none", lm_head="q4_0"))


def test_an_untied_model_chooses_twice():
    plan = make_plan(models.m2(), T2NConfig(embeddings="none", lm_head="q4_0"))
    assert plan["model.embed_tokens.weight"].format is None
    assert plan["lm_head.weight"].format is not None


def test_a_list_that_names_what_an_option_quantizes_is_refused():
    with pytest.raises(ConfigError, match=r"lm_head='q4_0' quantizes lm_head\.weight.*names 'lm_head'"):
        make_plan(models.m2(), T2NConfig(lm_head="q4_0", modules_to_not_convert=["lm_head"]))


def test_a_head_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"lm_head='q4_0', but LlamaModel has none"):
        make_plan(models.m1().model, T2NConfig(lm_head="q4_0"))


def test_a_shape_that_the_format_cannot_hold_gives_its_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = make_plan(models.m9(), T2NConfig())
    assert quantized(plan) == set()
    assert "48" in plan[Q].reason
    assert "80" in plan["model.layers.0.mlp.down_proj.weight"].reason


@pytest.mark.parametrize("make", [models.m4, models.m4_qwen3], ids=["mixtral", "qwen3_moe"])
def test_fused_experts_are_quantized(make):
    model = make()
    plan = make_plan(model, T2NConfig())
    experts = {name for name, p in model.named_parameters() if p.dim() == 3}
    assert len(experts) == 4
    assert experts <= quantized(plan)


def test_conv1d_is_held_the_other_way_round():
    plan = make_plan(models.m10(), T2NConfig())
    choice = plan["transformer.h.0.mlp.c_fc.weight"]
    assert choice.transposed
    assert choice.nbytes((64, 256), "exact") == 64 * 256 // 32 * 18
    assert plan["transformer.wpe.weight"].format is None


def test_nothing_is_quantized_when_nothing_is_asked_for():
    plan = make_plan(models.m1(), T2NConfig("none"))
    assert quantized(plan) == set()
    assert plan[Q].reason == "weights='none'"


def test_what_the_architecture_keeps_in_float32_stays_float():
    import transformers as hf

    config = hf.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    plan = make_plan(models.build(hf.T5ForConditionalGeneration, config), T2NConfig(modules_to_not_convert=[]))
    assert "float32" in plan["encoder.block.0.layer.1.DenseReluDense.wo.weight"].reason
    assert "encoder.block.0.layer.1.DenseReluDense.wi.weight" in quantized(plan)


def test_all_names_of_a_shared_table_share_one_choice():
    import transformers as hf

    config = hf.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    model = models.build(hf.T5ForConditionalGeneration, config)
    group = tied_groups(model)["shared.weight"]
    assert len(group) > 2
    plan = make_plan(model, T2NConfig(embeddings="q4_0"))
    assert all(plan[name].format is not None for name in group if name in plan)


def test_a_plan_needs_no_values():
    with torch.device("meta"):
        plan = make_plan(models.m1().to("meta"), T2NConfig())
    assert Q in quantized(plan)
