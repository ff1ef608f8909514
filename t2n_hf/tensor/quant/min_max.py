"""Scales from the largest magnitude of each group, as torch_to_nnef chooses them."""

import torch

from t2n_hf.errors import ConfigError
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16

__all__ = ["fp_to_tract_q4_0_with_min_max_calibration", "qscale_per_group_f16_min_max_calibration"]


def qscale_per_group_f16_min_max_calibration(
    fp_tensor: torch.Tensor, n_bits: int, group_size: int, percentile: float = 1.0
) -> QScalePerGroupF16:
    """Choose a scale for each group of `fp_tensor`: its largest magnitude falls on the end of the range.

    `percentile` below 1 takes that quantile of the magnitudes instead, and clips what is beyond. Scales are negative:
    the longer end of the range is the positive one. `QScalePerGroupF16.fitted`, like `QTensorTractScaleOnly.quantize`,
    lets the sign of the largest value choose the end, which loses less.

    Raises QuantizationError when the tensor does not divide into groups, ConfigError for a percentile outside (0, 1].
    """
    if not 0.0 < percentile <= 1.0:
        raise ConfigError(f"percentile={percentile!r}; expected more than 0 and at most 1")
    magnitudes = QScalePerGroupF16.reshape_tensor_per_group(fp_tensor.detach(), group_size).abs().float()
    largest = magnitudes.amax(dim=1) if percentile == 1 else torch.quantile(magnitudes, percentile, dim=1)
    return QScalePerGroupF16(group_size, largest / -(2 ** (n_bits - 1)), n_bits)


def fp_to_tract_q4_0_with_min_max_calibration(
    fp_tensor: torch.Tensor, percentile: float = 1.0
) -> QTensorTractScaleOnly:
    """Quantize a float tensor (..., N, K), K % 32 == 0, to Q4_0 by `qscale_per_group_f16_min_max_calibration`.

    Raises QuantizationError for a shape that does not fit.
    """
    values = fp_tensor.detach()
    reason = QTensorTractScaleOnly.refuses(values.shape, values.dtype)
    if reason is not None:
        QTensorTractScaleOnly.quantize(values)  # raises, in words
    scheme = qscale_per_group_f16_min_max_calibration(values, n_bits=4, group_size=32, percentile=percentile)
    return QTensorTractScaleOnly(values, scheme, fp_tensor.dtype)
