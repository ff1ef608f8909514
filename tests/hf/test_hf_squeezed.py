"""Encoders that work on sums of neighbouring frames: the same results at any number of frames, in one capture."""

import pytest
import torch
import transformers

from t2n_hf import export_nnef
from t2n_hf.hf.capturable.squeezed import capturable_squeezes

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8,),
    "conv_stride": (1,),
    "conv_kernel": (1,),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "squeeze_factor": 2,
}
KINDS = [transformers.SEWModel, transformers.SEWDModel]


def encoder_of(kind):
    torch.manual_seed(0)
    return kind(kind.config_class(**SIZES)).eval().encoder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_frames_that_are_left_over_are_zeros_as_before(kind):
    encoder = encoder_of(kind)
    for frames in range(4, 12):
        states = torch.randn(2, frames, 16)
        with torch.no_grad():
            expected = encoder(states.clone())[0]
            with capturable_squeezes(encoder):
                found = encoder(states.clone())[0]
        assert found.shape == (2, frames, 16)
        assert torch.equal(found, expected)
    assert "forward" not in vars(encoder.pool) | vars(encoder.upsample)


@pytest.mark.tract
@pytest.mark.parametrize("kind", [transformers.SEWForCTC, transformers.SEWDForCTC], ids=lambda kind: kind.__name__)
def test_a_model_is_exported_for_any_number_of_samples(kind, tmp_path):
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES, vocab_size=8)).eval()
    report = export_nnef(model, tmp_path / "out", check=True)  # at lengths of both kinds, even and odd
    assert report.check == "passed"
