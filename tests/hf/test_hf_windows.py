"""Attention in windows as it is captured, run in PyTorch: at every length it gives what transformers' own gives."""

import models
import pytest
import torch
import transformers as hf

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.hf.capturable.windows import capturable_windows
from t2n_hf.hf.tasks import interface_of

_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def longformer(kind=hf.LongformerModel):
    config = hf.LongformerConfig(
        vocab_size=64, attention_window=6, max_position_embeddings=64, pad_token_id=1, **_LAYERS
    )
    return models.build(kind, config)


def led():
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDE.items()}
    positions = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    return models.build(hf.LEDModel, hf.LEDConfig(vocab_size=64, d_model=16, attention_window=6, **sides, **positions))


_SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}


def longt5(kind=hf.LongT5Model, **changes):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
    return models.build(kind, hf.LongT5Config(vocab_size=64, local_radius=3, **sizes, **changes))


def longt5_sums(kind=hf.LongT5Model, **changes):
    return longt5(kind, **{"encoder_attention_type": "transient-global", "global_block_size": 4} | changes)


def canine(kind=hf.CanineModel):
    hashes = {"num_hash_buckets": 32, "num_hash_functions": 2, "downsampling_rate": 4, "local_transformer_stride": 6}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
    return models.build(kind, hf.CanineConfig(**hashes, **tokens, **_LAYERS))


MODELS = {"longformer": longformer, "led": led, "longt5": longt5, "longt5_sums": longt5_sums}


def inputs(model, length, *, padded=True, seen_by_all=()):
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(length))
    given = {"input_ids": ids}
    if padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, max(1, 2 * length // 3) :] = 0
    if seen_by_all:
        given["global_attention_mask"] = torch.zeros_like(ids)
        for row, place in seen_by_all:
            given["global_attention_mask"][row, place] = 1
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :2]
    return given


def results(model, given):
    with torch.no_grad():
        output = model(**given)
    # What comes out at padding, too.
    return [output.encoder_last_hidden_state if "decoder_input_ids" in given else output.last_hidden_state, output[0]]


def assert_same(model, given):
    wanted = results(model, given)
    with capturable_windows(model):
        got = results(model, given)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("length", [1, 5, 6, 12, 23])
@pytest.mark.parametrize("name", MODELS)
def test_windows_give_what_those_of_transformers_give(name, length):
    model = MODELS[name]()
    assert_same(model, inputs(model, length))


@pytest.mark.parametrize("length", [8, 11, 12, 23])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_chunks_of_characters_give_what_those_of_transformers_give(padded, length):
    model = canine()
    assert_same(model, inputs(model, length, padded=padded))


def test_fewer_characters_than_two_groups_are_refused():
    with pytest.raises(ConfigError, match="max_context=7; CanineModel takes 8 tokens at the least"):
        interface_of(canine(), max_context=7)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_without_a_mask_has_no_padding(name):
    model = MODELS[name]()
    assert_same(model, inputs(model, 13, padded=False))


@pytest.mark.parametrize("places", [[(0, 0), (1, 0)], [(0, 3)], [(0, 0), (0, 20), (1, 5), (1, 22)]], ids=str)
@pytest.mark.parametrize("name", ["longformer", "led"])
def test_tokens_that_see_all_others_and_are_seen_by_all(name, places):
    model = MODELS[name]()
    given = inputs(model, 23, seen_by_all=places)
    assert_same(model, given)
    local = {key: value for key, value in given.items() if key != "global_attention_mask"}
    assert not torch.allclose(results(model, given)[0], results(model, local)[0], atol=1e-2)


@pytest.mark.parametrize("name", [*MODELS, "canine"])
def test_models_are_as_before_after_an_error(name):
    model = (MODELS | {"canine": canine})[name]()
    before = [dict(vars(module)) for module in model.modules()]

    def fail_in_a_capture():
        with capturable_windows(model):
            assert sum("forward" in vars(module) for module in model.modules()) >= 3
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail_in_a_capture()
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_windows_are_refused(name):
    model = MODELS[name]()
    with capturable_windows(model), pytest.raises(CaptureError, match="export it with output_attentions=False"):
        model(**inputs(model, 5), output_attentions=True)


@pytest.mark.tract
def test_a_classifier_whose_first_token_sees_all_has_any_length(tmp_path):
    assert export_nnef(longformer(hf.LongformerForSequenceClassification), tmp_path / "out").check == "passed"


@pytest.mark.tract
@pytest.mark.parametrize("make", [longt5, longt5_sums])
def test_an_encoder_in_blocks_has_any_length(make, tmp_path):
    assert export_nnef(make(hf.LongT5EncoderModel), tmp_path / "out").check == "passed"


@pytest.mark.tract
def test_an_encoder_with_sums_of_blocks_has_a_decoder(tmp_path):
    model = longt5_sums(hf.LongT5ForConditionalGeneration, decoder_start_token_id=0)
    assert export_nnef(model, tmp_path / "out").check == "passed"


@pytest.mark.parametrize("shift", [-7, -3, 3, 7])
def test_sums_of_blocks_of_padding_on_either_side(shift):
    model = longt5_sums()
    given = inputs(model, 23, padded=False)
    mask = torch.ones_like(given["input_ids"])
    mask[1, :shift] = 0
    assert_same(model, given | {"attention_mask": mask})


def test_sums_of_blocks_of_a_size_that_floats_do_not_tell_are_refused():
    with pytest.raises(CaptureError, match=r"blocks of 25 tokens \(global_block_size\)"):
        export_nnef(longt5_sums(hf.LongT5EncoderModel, global_block_size=25), "out", check=False)


@pytest.mark.slow
@pytest.mark.tract
def test_characters_have_any_length(tmp_path):
    assert export_nnef(canine(hf.CanineForTokenClassification), tmp_path / "out").check == "passed"


@pytest.mark.parametrize("kind", [hf.BigBirdForMaskedLM, hf.BigBirdPegasusForConditionalGeneration])
def test_a_model_that_attends_in_random_blocks_to_long_texts_is_refused(kind, tmp_path):
    if kind is hf.BigBirdForMaskedLM:
        config = hf.BigBirdConfig(vocab_size=64, block_size=4, num_random_blocks=1, **_LAYERS)
    else:
        sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDE.items()}
        config = hf.BigBirdPegasusConfig(vocab_size=64, d_model=16, block_size=4, num_random_blocks=1, **sides)
    with pytest.raises(CaptureError, match="load it with attention_type='original_full'"):
        export_nnef(models.build(kind, config), tmp_path / "out", check=False)
