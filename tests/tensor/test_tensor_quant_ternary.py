"""Ternary weights against gguf's, numpy, and an exhaustive search for the best scale."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from t2n_hf.contract import InferenceTarget
from t2n_hf.errors import QuantizationError
from t2n_hf.nnef.dat import read_dat
from t2n_hf.tensor.opaque import materialised_counts
from t2n_hf.tensor.quant import TernaryTensor


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unpacked(weight):
    """Scales and signs as the documentation of the block says, by numpy."""
    blocks = weight.ternary.numpy()
    packed = blocks[..., 2:]
    signs = 1 - np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).astype(np.int8)
    return blocks[..., :2].copy().view("<f2").astype(np.float32), signs


def test_what_is_ternary_already_is_kept_exactly_as_gguf_keeps_it():
    signs = torch.randint(-1, 2, (20, 512), generator=torch.Generator().manual_seed(0)).float()
    scales = noise(20, 2).abs().clamp_min(0.01).to(torch.float16).float()  # one for 256 values, as gguf has it
    floats = (signs.view(20, 2, 256) * scales.unsqueeze(-1)).view(20, 512)
    kind = gguf.GGMLQuantizationType.TQ2_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(floats.numpy(), kind), kind)
    weight = TernaryTensor.quantize(floats)
    np.testing.assert_array_equal(weight.to_base_tensor().numpy(), theirs)
    assert torch.equal(weight.to_base_tensor(), floats)


def test_values_are_sign_times_scale():
    weight = TernaryTensor.quantize(noise(16, 96))
    scales, signs = unpacked(weight)
    np.testing.assert_array_equal(weight.to_base_tensor().numpy(), (signs * scales).reshape(16, 96))
    assert set(np.unique(signs)) == {-1, 0, 1}
    assert (scales > 0).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_no_other_scale_has_a_smaller_error(weighted):
    floats = noise(30, 32)
    importance = torch.rand(32, generator=torch.Generator().manual_seed(1)) ** 4 if weighted else None
    weights = np.ones(32) if importance is None else importance.numpy()
    values = TernaryTensor.quantize(floats, importance=importance).to_base_tensor().numpy()
    x = floats.numpy()
    found = (weights * (x - values) ** 2).sum(axis=-1)
    grid = np.linspace(0, np.abs(x).max(axis=-1), 4000)[..., None]
    errors = (weights * np.minimum(x**2, (np.abs(x) - grid) ** 2)).sum(axis=-1)
    assert (found <= errors.min(axis=0) * 1.0005).all()


def test_importance_lowers_the_weighted_error():
    floats = noise(100, 128)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(1)) ** 6
    plain, weighted = (TernaryTensor.quantize(floats, importance=i).to_base_tensor() for i in (None, importance))
    before, after = ((importance * (values - floats).square()).sum() for values in (plain, weighted))
    assert float(after) < 0.9 * float(before)
    nothing = TernaryTensor.quantize(floats, importance=torch.zeros(128))
    assert torch.equal(nothing.to_base_tensor(), plain)


@pytest.mark.parametrize(
    ("importance", "reason"),
    [(torch.ones(64), r"shape \(64,\)"), (-torch.ones(128), "negative"), (torch.full((128,), torch.nan), "NaN")],
    ids=["shape", "negative", "nan"],
)
def test_importance_that_does_not_fit_is_refused_by_name(importance, reason):
    with pytest.raises(QuantizationError, match=f"mlp.weight .*{reason}"):
        TernaryTensor.quantize(noise(4, 128), name="mlp.weight", importance=importance)


def test_extreme_blocks_are_held_exactly_or_refused_by_name():
    floats = noise(4, 64)
    floats[0, :32] = 0
    floats[1, :32] *= 1e-8
    values = TernaryTensor.quantize(floats).to_base_tensor()
    assert not values[0, :32].any()
    assert bool(torch.isfinite(values).all())
    assert torch.equal(
        TernaryTensor.quantize(torch.full((1, 32), -65504.0)).to_base_tensor(), torch.full((1, 32), -65504.0)
    )
    with pytest.raises(QuantizationError, match=r"layer\.weight .*beyond 65504"):
        TernaryTensor.quantize(torch.full((1, 32), 70000.0), name="layer.weight")
    assert "48 values" in TernaryTensor.refuses((64, 48), torch.float32)


def test_rows_and_products_never_make_all_of_it_dense():
    weight = TernaryTensor.quantize(noise(3000, 256))
    dense = weight.to_base_tensor()
    before = materialised_counts()
    ids = torch.tensor([[0, 2999, 5], [7, 7, 1]])
    assert torch.equal(F.embedding(ids, weight), dense[ids])
    x = noise(3, 256, seed=1)
    torch.testing.assert_close(F.linear(x, weight), F.linear(x, dense))
    assert torch.equal(weight[100], dense[100])
    torch.testing.assert_close(x @ weight.T, x @ dense.T)
    assert materialised_counts() == before
    assert weight.opaque_nbytes == 3000 * 256 // 32 * 10


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_the_dat_file_holds_the_dense_values_unrounded(dtype, tmp_path):
    weight = TernaryTensor.quantize(noise(5, 6, 64), dtype=torch.bfloat16)
    state = weight.to_offload_state()
    TernaryTensor.write_offload_state_in_file(state, tmp_path, "w", InferenceTarget(dtype=dtype))
    scales, signs = unpacked(weight)
    np.testing.assert_array_equal(read_dat(tmp_path / "w.dat").astype(np.float32), (signs * scales).reshape(5, 6, 64))
