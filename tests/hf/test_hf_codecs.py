"""Neural codecs as they are captured, run in PyTorch and in tract: the same sounds at every length."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from t2n_hf import export_nnef
from t2n_hf.hf.capturable.codecs import capturable_codecs
from t2n_hf.tract.runner import TractRunner

_SIZES = {"num_filters": 4, "codebook_size": 32, "upsampling_ratios": [4, 2]}


def built(kind, config):
    """A codec whose codes differ: those of a new one are zeros."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith((".embed", ".embed_sum")):
            buffer.normal_()
    return model


def encodec(**changes):
    sizes = {"hidden_size": 16, "codebook_dim": 16, "num_lstm_layers": 1, "target_bandwidths": [30.0]} | _SIZES
    return built(hf.EncodecModel, hf.EncodecConfig(**(sizes | changes)))


def mimi(**changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 32, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8}
    sizes |= {"num_quantizers": 3, "num_semantic_quantizers": 1, "sliding_window": 6, "upsample_groups": 16}
    return built(hf.MimiModel, hf.MimiConfig(**(sizes | _SIZES | changes), frame_rate=None))


MODELS = {
    "encodec": encodec,
    "encodec_of_both_sides": lambda: encodec(use_causal_conv=False, norm_type="time_group_norm", normalize=True),
    "mimi": mimi,
    "mimi_mirrored": lambda: mimi(pad_mode="reflect"),
}


def sound(length):
    return torch.randn(2, 1, length, generator=torch.Generator().manual_seed(length))


def heard(model, length):
    with torch.no_grad():
        return model(sound(length)).audio_values


@pytest.mark.parametrize("name", MODELS)
def test_codecs_give_what_those_of_transformers_give_at_every_length(name):
    model = MODELS[name]()
    for length in (1, 2, 7, 8, 9, 33, 48, 61):
        wanted = heard(model, length)
        with capturable_codecs(model):
            torch.testing.assert_close(heard(model, length), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_codecs_are_as_before_afterwards(name):
    model = MODELS[name]()
    with capturable_codecs(model):
        heard(model, 20)  # Mimi's codebooks keep what they calculate of their sums once
    before = [(set(vars(module)), dict(module._buffers)) for module in model.modules()]
    with capturable_codecs(model):
        heard(model, 20)
    for module, (names, buffers) in zip(model.modules(), before, strict=True):
        assert set(vars(module)) == names
        assert all(module._buffers[name] is buffer for name, buffer in buffers.items())


@pytest.mark.tract
@pytest.mark.parametrize("name", ["encodec", pytest.param("mimi", marks=pytest.mark.slow)])
def test_an_archive_takes_sounds_of_any_length(tmp_path, name):
    model = MODELS[name]()
    samples = torch.export.Dim("L", min=17)  # more than one frame
    export_nnef(
        Sounds(model),
        tmp_path / "out",
        example_args=(sound(48),),
        dynamic_shapes=({2: samples},),
        output_names=["sound"],
        check=False,
        format="dir",
    )
    with TractRunner(tmp_path / "out" / "model") as runner:
        (given,) = runner.inputs
        for length in (17, 64, 77):
            got = runner.run({given: sound(length).numpy()})["sound"]
            wanted = heard(model, length).numpy()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
            assert len(model.encode(sound(length)).audio_codes.unique()) > 2


class Sounds(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).audio_values
