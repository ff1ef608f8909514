"""Funnel's pooled positions as they are captured, run in PyTorch and in tract: what transformers' own give."""

import models
import numpy as np
import pytest
import torch
import transformers as hf

from t2n_hf import export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.hf.capturable.pooled_places import capturable_pooled_places, fewest_places
from t2n_hf.hf.tasks import interface_of
from t2n_hf.tract.runner import TractRunner

_SIZES = {"vocab_size": 64, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1}
VARIANTS = {
    "as_published": {},
    "with_the_last_token": {"truncate_seq": False},
    "without_cls": {"separate_cls": False},
    "keys_pooled_too": {"pool_q_only": False},
    "factorized": {"attention_type": "factorized"},
}


def funnel(kind=hf.FunnelModel, **changes):
    return models.build(kind, hf.FunnelConfig(**_SIZES, **({"block_sizes": [1, 2, 1]} | changes)))


def inputs(length):
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, max(1, 2 * length // 3) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def state(model, length):
    with torch.no_grad():
        return model(**inputs(length)).last_hidden_state


@pytest.mark.parametrize("kind", [hf.FunnelModel, hf.FunnelBaseModel])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_pooled_positions_give_what_those_of_transformers_give(changes, kind):
    model = funnel(kind, **changes)
    for length in (max(5, fewest_places(model)), 8, 9, 16, 23):  # of 4 tokens transformers' own positions are too few
        wanted = state(model, length)
        with capturable_pooled_places(model):
            torch.testing.assert_close(state(model, length), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", list(VARIANTS.values())[:3], ids=list(VARIANTS)[:3])
def test_each_block_pools_to_several_places_from_the_fewest_tokens_on_and_not_before(changes, blocks):
    model = funnel(hf.FunnelBaseModel, block_sizes=[1] * blocks, attention_type="factorized", **changes)
    pooled = []
    pool = model.encoder.attention_structure.pre_attention_pooling
    model.encoder.attention_structure.pre_attention_pooling = lambda *given: pooled.append(1) or pool(*given)
    fewest = fewest_places(model)
    assert state(model, fewest).shape[1] > 1
    assert len(pooled) == blocks - 1
    if blocks > 1:
        pooled.clear()
        places = state(model, fewest - 1).shape[1]
        assert places == 1 if changes == VARIANTS["without_cls"] else len(pooled) == blocks - 2


def test_fewer_tokens_than_are_pooled_are_refused():
    with pytest.raises(ConfigError, match="max_context=4; FunnelModel takes 5 tokens at the least"):
        interface_of(funnel(), max_context=4)


@pytest.mark.slow
@pytest.mark.tract
@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_an_archive_takes_texts_of_any_length(tmp_path, changes):
    model = funnel(**changes)
    export_nnef(model, tmp_path / "out", check=False, format="dir")
    model.double()  # in f32 PyTorch itself is 1e-4 beside it
    with TractRunner(tmp_path / "out" / "model") as runner:
        for length in (max(5, fewest_places(model)), 12, 31):
            got = runner.run({name: value.numpy() for name, value in inputs(length).items()})["last_hidden_state"]
            np.testing.assert_allclose(got, state(model, length).numpy(), atol=1e-4)
