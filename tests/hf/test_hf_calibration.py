"""Calibration: sums of squares against numpy, for linear layers, Conv1D and experts; from disk; what it refuses."""

import models
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

from t2n_hf import T2NConfig, calibrate, quantize_checkpoint
from t2n_hf.errors import ConfigError
from t2n_hf.hf.calibration import input_statistics
from t2n_hf.hf.loading import load_checkpoint

LENGTH = 40
SHARED = 16


def ids(length: int = 100) -> torch.Tensor:
    return models.prompt(length)[0]


@torch.no_grad()
def inputs_of(model, names, length=LENGTH):
    """What each module of `names` is given for the windows of `ids()`, as f64 rows, by a hook of its own."""
    rows = {name: [] for name in names}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(
            lambda module, args, out, name=name: rows[name].append(
                args[0].reshape(-1, args[0].shape[-1]).double().numpy()
            )
        )
    for window in ids().split(length):
        model(window[None])
    return {name: np.concatenate(parts) for name, parts in rows.items()}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (models.m1, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]),
        (models.m10, ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"]),
        (models.m8, ["model.layers.1.self_attn.o_proj"]),
    ],
    ids=["llama", "gpt2", "bf16"],
)
def test_mean_squares_are_those_that_numpy_finds(build, names):
    found = calibrate(build(), [ids()], window=LENGTH)
    for name, rows in inputs_of(build(), names).items():
        expected = (rows**2).mean(axis=0)
        np.testing.assert_allclose(found[f"{name}.weight"].numpy(), expected, rtol=1e-5)
    assert found.tokens == 100


def test_tied_weights_are_known_by_all_of_their_names():
    found = calibrate(models.m1(), [ids()])
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_embeddings_and_norms_have_none():
    names = set(calibrate(models.m2(), [ids()]))
    assert "lm_head.weight" in names
    assert not [name for name in names if "norm" in name or "embed" in name]
    assert len(names) == 2 * 7 + 1


@torch.no_grad()
def expert_rows(experts, states, index):
    """Inputs of both products of each expert, by the definition of a mixture of experts."""
    rows = []
    for expert in range(experts.num_experts):
        tokens = torch.where((index == expert).any(dim=-1))[0]
        gate, up = (states[tokens] @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        rows.append((states[tokens].double().numpy(), (experts.act_fn(gate) * up).double().numpy()))
    return rows


@pytest.mark.parametrize("build", [models.m4, models.m4_qwen3], ids=["mixtral", "qwen3"])
def test_each_expert_has_its_own_and_leans_on_all(build):
    model, seen = build(), []
    experts = model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda module, args: seen.append((args[0].clone(), args[1].clone())))
    found = calibrate(model, [ids()], window=LENGTH)
    handle.remove()
    per_call = [expert_rows(experts, *call) for call in seen]
    for place, leaf in enumerate(("gate_up_proj", "down_proj")):
        rows = [np.concatenate([call[e][place] for call in per_call]) for e in range(experts.num_experts)]
        shared = (np.concatenate(rows) ** 2).mean(axis=0)
        value = found[f"model.layers.1.mlp.experts.{leaf}"].numpy()
        for expert, own in enumerate(rows):
            expected = ((own**2).sum(axis=0) + SHARED * shared) / (len(own) + SHARED)
            np.testing.assert_allclose(value[expert], expected, rtol=1e-4, atol=1e-7)
    assert input_statistics._SHARED_TOKENS == SHARED


def test_an_expert_that_no_token_reaches_has_the_mean_of_the_others():
    model = models.m4(num_local_experts=8)
    found = calibrate(model, [[5]])["model.layers.0.mlp.experts.gate_up_proj"]
    assert found.shape == (8, 64)
    assert bool(torch.isfinite(found).all())
    assert (
        len({tuple(row.tolist()) for row in found.round(decimals=5)}) == 1
    )  # one token: all saw, or lean on, the same


def test_stacked_products_are_seen():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **{
            **models.SHAPE,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "head_dim": 16,
            "attention_chunk_size": 64,
        }
    )
    found = calibrate(models.build(Llama4ForCausalLM, config), [ids()])
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == 4
    assert all(found[name].shape[0] == 4 for name in experts)


def test_from_a_path_the_weights_stay_on_disk_and_the_result_is_the_same(tmp_path):
    for build in (models.m1, models.m4):
        folder = models.saved(build(), tmp_path)
        expected, found = calibrate(build(), [ids()], window=LENGTH), calibrate(folder, [ids()], window=LENGTH)
        assert found.source == folder.name
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_batches_change_nothing_but_rounding():
    one, several = (calibrate(models.m1(), [ids()], window=25, batch_size=size) for size in (1, 3))
    for name in one:
        torch.testing.assert_close(one[name], several[name], rtol=1e-4, atol=1e-6)


def test_it_stops_after_the_tokens_that_were_asked_for():
    found = calibrate(models.m1(), ids().repeat(3, 1), window=30, max_tokens=110)
    assert found.tokens == 110


def test_the_model_is_as_it_was_also_after_an_interrupt():
    model = models.m4().train()
    model.set_experts_implementation("batched_mm")
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, [ids()])
    handle.remove()
    calibrate(model, [ids()])
    assert all(module.training for module in model.modules())
    assert model.config._experts_implementation == "batched_mm"
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks


def words() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[CLS]", "[SEP]", *"abcdefghij"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(names)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def test_texts_are_cut_into_windows_with_special_tokens():
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=10,
    )  # fmt: skip
    model, seen = BertModel(config).eval(), []
    model.embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    found = calibrate(model, ["a b c d e f g h i j a b", "", "c"], words())
    assert [row.tolist() for row in seen] == [[[1, *range(3, 11), 2]], [[1, 11, 12, 3, 4, 2]], [[1, 5, 2]]]
    assert found.tokens == 10 + 6 + 3
    assert "encoder.layer.0.attention.self.query.weight" in found


def test_a_path_brings_its_tokenizer(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    words().save_pretrained(folder)
    assert calibrate(folder, "a b c").tokens == 5


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((["some text"],), {}, "need a tokenizer"),
        (([],), {}, "no tokens"),
        (([[1, 2, 300]],), {}, "the model has 0 to 255"),
        (([[0.5, 1.0]],), {}, "whole numbers"),
        (([object()],), {}, "neither a text"),
        (([[1]],), {"window": 0}, "window=0"),
        (([[1]],), {"max_tokens": True}, "max_tokens=True"),
        (([[1]],), {"batch_size": 0}, "batch_size=0"),
        (([[1]],), {"dtype": torch.float16}, "it is loaded already"),
    ],
    ids=["tokenizer", "nothing", "vocabulary", "floats", "objects", "window", "max_tokens", "batch_size", "options"],
)
def test_what_cannot_be_calibrated_on_is_refused(arguments, options, text):
    with pytest.raises(ConfigError, match=text):
        calibrate(models.m1(), *arguments, **options)


def tiny_vit():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))


def tiny_clip():
    shared = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    text, vision = {"vocab_size": 256, **shared}, {"image_size": 32, "patch_size": 8, **shared}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize("build", [tiny_vit, tiny_clip], ids=["images", "images_and_text"])
def test_models_that_read_more_than_text_are_refused(build):
    with pytest.raises(ConfigError, match=r"(ViT|CLIP)Model has no one table of token embeddings"):
        calibrate(build(), [[1, 2, 3]])


def test_activations_that_overflow_are_refused_by_the_name_of_the_weight():
    model = models.m1()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(ConfigError, match=r"down_proj\.weight is not finite"):
        calibrate(model, [ids()])


@pytest.mark.parametrize("build", [models.m1, models.m4, models.m10], ids=["llama", "mixtral", "gpt2"])
def test_quantizing_with_it_lowers_the_error_where_it_matters_in_both_ways_alike(build, tmp_path):
    source, folder = build(), models.saved(build(), tmp_path)
    importance = calibrate(source, [ids()])
    importance.save(tmp_path / "importance.safetensors")
    plain = load_checkpoint(folder, weights="q4_0", device_map=None)
    config = T2NConfig(importance=tmp_path / "importance.safetensors")
    weighted = load_checkpoint(folder, config=config, device_map=None)
    quantize_checkpoint(folder, tmp_path / "packed", importance=importance)
    again = load_checkpoint(tmp_path / "packed", device_map=None)
    errors = {"plain": 0.0, "weighted": 0.0}
    for name, value in importance.items():
        if type(weighted.get_parameter(name)) is torch.nn.Parameter:
            continue
        weight = source.get_parameter(name).detach()
        channels = value if weight.shape[-1] == value.shape[-1] else value[..., None]
        if value.dim() > 1:
            channels = value[:, None, :]
        for kind, model in (("plain", plain), ("weighted", weighted)):
            off = model.get_parameter(name).to_base_tensor() - weight
            errors[kind] += float((off.square() * channels).sum() / (weight.square() * channels).sum())
        assert torch.equal(again.get_parameter(name), weighted.get_parameter(name))
    assert 0 < errors["weighted"] < 0.9 * errors["plain"]
