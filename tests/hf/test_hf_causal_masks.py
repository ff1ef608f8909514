"""FSMT's decoder has no causal mask beside a cache: with one, several tokens of a call are those of as many calls."""

import copy

import models
import pytest
import torch
import transformers as hf
from transformers import DynamicCache, EncoderDecoderCache

from t2n_hf import TractModelForSeq2SeqLM, export_nnef
from t2n_hf.hf.capturable.causal_masks import causal_with_cache

_SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}


def fsmt():
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDE.items()}
    config = hf.FSMTConfig(src_vocab_size=64, tgt_vocab_size=64, d_model=16, max_position_embeddings=48, **sides)
    return models.build(hf.FSMTForConditionalGeneration, config)


def ids(length, seed=0):
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_calls_of_any_length_give_what_one_run_without_a_cache_gives():
    model, source, target = fsmt(), ids(7), ids(6, seed=1)
    wanted = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with causal_with_cache(model):
        parts = [
            model(input_ids=source, decoder_input_ids=part, cache=cache, use_cache=True).logits
            for part in target.split([3, 1, 2], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_models_are_as_before_after_an_error():
    model = fsmt()
    before = [copy.copy(vars(module)) for module in model.modules()]

    def fail():
        with causal_with_cache(model):
            assert "forward" in vars(model.model.decoder)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert [vars(module) for module in model.modules()] == before


@pytest.mark.tract
@pytest.mark.filterwarnings("ignore")
def test_it_is_exported_as_encoder_and_decoder_and_generates_the_same(tmp_path):
    model = fsmt()
    export_nnef(model, tmp_path / "out")
    options = {"max_new_tokens": 8, "num_beams": 1, "do_sample": False}
    with TractModelForSeq2SeqLM.from_pretrained(tmp_path / "out") as archive:
        got = archive.generate(ids(7), **options)
    assert got.tolist() == model.generate(ids(7), **options).tolist()
