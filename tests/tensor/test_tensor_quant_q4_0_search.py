"""Q4_0 scales chosen by importance: against every scale there is, computed by numpy."""

import numpy as np
import pytest
import torch

from t2n_hf.errors import QuantizationError
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant.q4_0_blocks import dequantize_blocks, quantize_rows, scales_of
from t2n_hf.tensor.quant.q4_0_search import quantize_weighted_rows

ALL_SCALES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def matrix(rows: int = 6, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 3


def importance_of(columns: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.rand(columns, generator=torch.Generator().manual_seed(seed)) ** 4 * 50


def errors(values: np.ndarray, found: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """The weighted squared error of each block (rows, K/32), by the definition, in f64."""
    values, found = values.astype(np.float64), found.astype(np.float64)
    square = (values**2).mean(axis=1, keepdims=True)
    weighted = (importance + importance.mean()) * np.sqrt(square + values**2) * (found - values) ** 2
    return weighted.reshape(len(values), -1, 32).sum(axis=2)


def errors_of(values: torch.Tensor, blocks: torch.Tensor, importance: torch.Tensor) -> np.ndarray:
    return errors(values.numpy(), dequantize_blocks(blocks, torch.float32).numpy(), importance.numpy())


def least_errors(values: torch.Tensor, importance: torch.Tensor) -> np.ndarray:
    """The same, least over every scale that f16 has, with the nearest quants."""
    array = values.numpy().astype(np.float64)
    # A scale below a twentieth of the largest value clips it to less than half: none of the best is there.
    reach = np.abs(array).max()
    near = np.isfinite(ALL_SCALES) & (np.abs(ALL_SCALES) < reach) & (np.abs(ALL_SCALES) > 0.01 * reach)
    scales = ALL_SCALES[near].astype(np.float64)
    square = (array**2).mean(axis=1, keepdims=True)
    matters = importance.numpy().astype(np.float64)
    weights = ((matters + matters.mean()) * np.sqrt(square + array**2)).reshape(-1, 32)
    least = []
    for block, weight in zip(array.reshape(-1, 32), weights, strict=True):
        nearest = np.clip(np.round(block / scales[:, None]), -8, 7) * scales[:, None]
        least.append((weight * (nearest - block) ** 2).sum(axis=1).min())
    return np.array(least).reshape(len(array), -1)


def test_the_error_is_near_the_least_that_any_scale_gives():
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    importance = importance_of()
    least = least_errors(values, importance)
    found = errors_of(values, quantize_weighted_rows(values, importance), importance)
    plain = errors_of(values, quantize_rows(values), importance)
    assert (found >= least * (1 - 1e-5)).all()
    assert found.sum() <= 1.1 * least.sum()
    assert found.sum() - least.sum() <= 0.3 * (plain.sum() - least.sum())


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_worse_than_by_the_plain_rule(seed):
    values, importance = matrix(100, 256, seed), importance_of(256, seed)
    found = errors_of(values, quantize_weighted_rows(values, importance), importance)
    plain = errors_of(values, quantize_rows(values), importance)
    assert (found <= plain * (1 + 1e-5)).all()


def test_quants_are_the_nearest_under_the_stored_scale():
    values = matrix(100, 256)
    blocks = quantize_weighted_rows(values, importance_of(256))
    scales = scales_of(blocks).float().unsqueeze(-1)
    nearest = (values.unflatten(-1, (-1, 32)) / scales).round().clamp(-8, 7) * scales
    found = dequantize_blocks(blocks, torch.float32).unflatten(-1, (-1, 32))
    off = (found - values.unflatten(-1, (-1, 32))).abs() - (nearest - values.unflatten(-1, (-1, 32))).abs()
    assert bool((off <= 1e-5 * scales.abs()).all())


def test_what_holds_the_most_is_kept_best():
    values, importance = matrix(200), torch.full((64,), 1e-3)
    importance[7] = 1000.0
    error = (dequantize_blocks(quantize_weighted_rows(values, importance), torch.float32) - values)[:, 7].norm()
    assert error < 0.9 * (dequantize_blocks(quantize_rows(values), torch.float32) - values)[:, 7].norm()


def test_without_importance_the_plain_rule_holds():
    assert torch.equal(quantize_weighted_rows(matrix(), torch.zeros(64)), quantize_rows(matrix()))


@pytest.mark.parametrize("factor", [2.0**-100, 0.5, 2.0**100], ids=str)
def test_only_the_proportions_of_importance_count(factor):
    values, importance = matrix(), importance_of()
    assert torch.equal(quantize_weighted_rows(values, importance * factor), quantize_weighted_rows(values, importance))


def test_rows_do_not_depend_on_their_neighbours():
    values, importance = matrix(3000), importance_of()
    whole = quantize_weighted_rows(values, importance)
    assert torch.equal(torch.cat([quantize_weighted_rows(part, importance) for part in values.split(37)]), whole)
    assert torch.equal(quantize_weighted_rows(values, importance), whole)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e-8, 1e-6, 8 * 65000.0], ids=str)
def test_blocks_of_extreme_values_are_finite_and_near(size):
    values = matrix(4).clamp(-1, 1)
    values[1, :32] *= size
    values[2] *= size
    importance = importance_of() * torch.tensor([1.0, 1e30]).repeat_interleave(32)
    found = dequantize_blocks(quantize_weighted_rows(values, importance), torch.float32)
    assert bool(torch.isfinite(found).all())
    plain = dequantize_blocks(quantize_rows(values), torch.float32)
    for row in range(4):
        assert (found[row] - values[row]).norm() <= 2 * (plain[row] - values[row]).norm()
    if size <= 1e-8:
        assert not bool(found[2].any())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 9 * 65504.0], ids=str)
def test_what_no_scale_holds_is_refused_by_name(bad):
    values = matrix()
    values[2, 3] = bad
    with pytest.raises(QuantizationError, match=r"layers\.0\.weight"):
        quantize_weighted_rows(values, importance_of(), "layers.0.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_class_takes_importance_for_weights_of_any_rank(dtype):
    values, importance = matrix(12).to(dtype), importance_of()
    expected = quantize_weighted_rows(values.float(), importance)
    flat = QTensorTractScaleOnly.quantize(values, importance=importance)
    stacked = QTensorTractScaleOnly.quantize(values.reshape(3, 4, 64), importance=importance)
    assert torch.equal(flat.q4_0, expected)
    assert torch.equal(stacked.q4_0.flatten(0, 1), expected)


@pytest.mark.parametrize("wrong", [torch.ones(32), -torch.ones(64), torch.full((64,), float("nan"))], ids=range(3))
def test_importance_that_does_not_belong_is_refused_by_name(wrong):
    with pytest.raises(QuantizationError, match=r"layers\.0\.weight"):
        QTensorTractScaleOnly.quantize(matrix(), importance=wrong, name="layers.0.weight")
