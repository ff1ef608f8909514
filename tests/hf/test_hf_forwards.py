"""Forwards that ask for what only a run knows, as they are captured: free lengths, and transformers' own numbers."""

import models
import pytest
import torch
import transformers as hf

from t2n_hf import export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.hf.capturable.forwards import capturable_forwards
from t2n_hf.hf.tasks import interface_of
from t2n_hf.store.manifest import ExportManifest

_TEXT = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}


class Measured(hf.PreTrainedModel):
    """Takes its batch by `len()`, and an assert looks at values."""

    config_class = hf.PreTrainedConfig
    main_input_name = "x"

    def __init__(self, config=None):
        super().__init__(config or hf.PreTrainedConfig())
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.post_init()

    def forward(self, x):
        assert x.max().item() < 100
        return self.added(x) + len([1, 2])

    def added(self, x):
        return x + self.weight * torch.ones(len(x), 3)


def xlm():
    return models.build(hf.XLMModel, hf.XLMConfig(vocab_size=64, **_TEXT))


def flaubert():
    return models.build(hf.FlaubertModel, hf.FlaubertConfig(vocab_size=64, **_TEXT))


def fsmt():
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDE.items()}
    config = hf.FSMTConfig(src_vocab_size=64, tgt_vocab_size=64, d_model=16, **sides)
    return models.build(hf.FSMTForConditionalGeneration, config)


_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


def fnet():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 32}
    return models.build(hf.FNetForMaskedLM, hf.FNetConfig(vocab_size=64, **sizes))


def mae(**changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return models.build(hf.ViTMAEModel, hf.ViTMAEConfig(**sizes, image_size=16, patch_size=4, **changes))


def ids(batch, length, seed=0):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_the_length_of_a_tensor_is_a_symbol_and_asserts_about_values_are_left_out():
    model = Measured()
    batch = torch.export.Dim("B", min=1)
    with capturable_forwards(model):
        exported = torch.export.export(model, (torch.zeros(2, 3),), dynamic_shapes=({0: batch},))
    for rows in (1, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(exported.module()(x), model(x))


def test_a_model_that_asks_is_captured_from_examples_with_a_free_batch(tmp_path):
    batch = torch.export.Dim("B", min=1)
    export_nnef(Measured(), tmp_path / "out", example_args=(torch.zeros(2, 3),), dynamic_shapes=({0: batch},))
    assert ExportManifest.read(tmp_path / "out").inputs[0]["shape"] == ["B", 3]


@pytest.mark.parametrize("make", [xlm, flaubert, fsmt, Measured], ids=lambda make: make.__name__)
def test_models_are_as_before_after_an_error(make):
    model = make()
    before = [dict(vars(module)) for module in model.modules()]

    def fail_in_a_capture():
        with capturable_forwards(model):
            assert any("forward" in vars(module) for module in model.modules())
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail_in_a_capture()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_models_that_ask_nothing_keep_their_forwards():
    model = models.m1()
    with capturable_forwards(model):
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("padding", [False, True], ids=["no padding", "padding"])
@torch.no_grad()
def test_a_padding_mask_of_no_padding_changes_nothing(padding):
    model = fsmt()
    given = {"input_ids": ids(2, 7), "decoder_input_ids": ids(2, 5, seed=1)}
    if padding:
        given["decoder_input_ids"][1, 3:] = model.config.pad_token_id
    wanted = model(**given, use_cache=False).logits
    with capturable_forwards(model):
        got = model(**given, use_cache=False).logits
    torch.testing.assert_close(got, wanted)


@pytest.mark.tract
@pytest.mark.parametrize("make", [xlm, pytest.param(flaubert, marks=pytest.mark.slow)], ids=["xlm", "flaubert"])
def test_texts_whose_lengths_were_asserted_have_any_length(make, tmp_path):
    assert export_nnef(make(), tmp_path / "out").check == "passed"
    shapes = {value["name"]: value["shape"] for value in ExportManifest.read(tmp_path / "out").inputs}
    assert shapes == {"input_ids": ["B", "S"], "attention_mask": ["B", "S"]}


@pytest.mark.tract
def test_a_model_without_a_padding_mask_takes_ids_alone(tmp_path):
    assert export_nnef(fnet(), tmp_path / "out").check == "passed"
    assert [value["name"] for value in ExportManifest.read(tmp_path / "out").inputs[:2]] == [
        "input_ids",
        "token_type_ids",
    ]


class Odd(hf.FNetForMaskedLM):
    def forward(self, input_ids, padding_mask=None):
        return super().forward(input_ids)


def test_a_mask_of_another_name_is_not_left_out():
    model = Odd(fnet().config)
    with pytest.raises(ConfigError, match="takes no attention_mask"):
        interface_of(model, task="fill-mask")


@pytest.mark.tract
def test_the_order_of_a_masked_autoencoders_patches_is_an_input(tmp_path):
    assert export_nnef(mae(mask_ratio=0.5), tmp_path / "out").check == "passed"
    manifest = ExportManifest.read(tmp_path / "out")
    assert {value["name"]: value["shape"] for value in manifest.inputs} == {
        "pixel_values": ["B", 3, 16, 16],
        "noise": ["B", 16],
    }
    assert manifest.outputs[0]["shape"] == ["B", 9, 16]


class Gaps(torch.nn.Module):
    """Layers of which one is none, as Informer's convolutions between its layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), None])

    def forward(self, x):
        for layer in self.layers:
            x = x if layer is None else layer(x).tanh()
        return x


@pytest.mark.tract
def test_a_list_of_layers_may_have_gaps(tmp_path):
    report = export_nnef(Gaps(), tmp_path / "out", example_args=(torch.zeros(2, 3),))
    assert report.check == "passed"


def test_a_mask_that_was_not_given_is_none_while_autoformer_is_captured():
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDE.items()}
    sizes = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 2}
    model = models.build(hf.AutoformerModel, hf.AutoformerConfig(**sizes, **sides, d_model=16))
    shapes = {"past_values": (2, 15), "past_time_features": (2, 15, 2), "past_observed_mask": (2, 15)}
    shapes |= {"future_values": (2, 6), "future_time_features": (2, 6, 2)}
    given = {name: torch.ones(shape) for name, shape in shapes.items()}
    wanted = model(**given, use_cache=False).last_hidden_state
    with capturable_forwards(model):
        exported = torch.export.export(model, (), {**given, "use_cache": False}, strict=False)
    torch.testing.assert_close(exported.module()(**given, use_cache=False).last_hidden_state, wanted)
