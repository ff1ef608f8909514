"""Quantized tensors (8 bits or fewer) under schemes that torch has not.

`q4_0` is what models are quantized to, with its `q4_0_blocks`, `q4_0_storage` and fast `kernels`. `qtensor` and
`scheme` (u8 values under a quantization scheme) are the classes that torch_to_nnef has for this: `q4_0` keeps their
interface, a new format needs neither.
"""

from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.quant.qtensor import QTensor, QTensorTract
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16, QScheme, U8Compressor

__all__ = ["QScalePerGroupF16", "QScheme", "QTensor", "QTensorTract", "QTensorTractScaleOnly", "U8Compressor"]
