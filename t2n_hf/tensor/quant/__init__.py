"""Quantized tensors (8 bits or fewer) under schemes that torch has not.

Classes that models are quantized to: `q4_0` (with `q4_0_blocks`, `q4_0_storage` and fast `kernels`; C code in `native`
and `native_quantize`), `q8_1` and `ternary`. What they share is in `packed_rows` and `packed_blocks`. `qtensor`,
`scheme`, `compressors` (u8 values under any scheme) and `min_max` are what torch_to_nnef has for this: a new format
needs none of them.
"""

from t2n_hf.tensor.quant.compressors import BitPacking, U8Compressor, ZlibCompression
from t2n_hf.tensor.quant.min_max import (
    fp_to_tract_q4_0_with_min_max_calibration,
    qscale_per_group_f16_min_max_calibration,
)
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.quant.q8_1 import QTensorTractQ81
from t2n_hf.tensor.quant.qtensor import QTensor, QTensorTract
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16, QScheme
from t2n_hf.tensor.quant.ternary import TernaryTensor

__all__ = [
    "BitPacking",
    "QScalePerGroupF16",
    "QScheme",
    "QTensor",
    "QTensorTract",
    "QTensorTractQ81",
    "QTensorTractScaleOnly",
    "TernaryTensor",
    "U8Compressor",
    "ZlibCompression",
    "fp_to_tract_q4_0_with_min_max_calibration",
    "qscale_per_group_f16_min_max_calibration",
]
