"""QTensor: an opaque tensor whose values are small unsigned integers under a quantization scheme."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.quant.scheme import QScheme, U8Compressor

__all__ = ["QTensor", "QTensorTract"]


class QTensor(OpaqueTensor):
    """Common interface of quantized tensors; by itself, u8 values under any `QScheme`, through any `U8Compressor`.

    Formats with a layout of their own (`QTensorTractScaleOnly`) derive from it and keep their own parts.
    """

    u8_blob: torch.Tensor
    qscheme: QScheme  # type: ignore[assignment]  # torch has a method of this name, for its own quantized tensors
    u8_compressors: list[U8Compressor]

    def __new__(
        cls,
        fp_tensor: torch.Tensor,
        qscheme: QScheme | None = None,
        dequant_to_dtype: torch.dtype = torch.float32,
        u8_compressors: list[U8Compressor] | None = None,
        *,
        requires_grad: bool = False,
    ) -> Self:
        """Quantize `fp_tensor` by `qscheme`; the result acts as a tensor of `dequant_to_dtype`.

        Without a scheme, `fp_tensor` must be a tensor of the class: the call by which torch and accelerate rebuild
        parameters.
        """
        if qscheme is None:
            return cls._as_parameter(fp_tensor, requires_grad)
        result = cls._shell(fp_tensor.shape, dequant_to_dtype, fp_tensor.device)
        result._fill(fp_tensor, qscheme, list(u8_compressors or []))
        return result

    def _fill(self, fp_tensor: torch.Tensor, qscheme: QScheme, u8_compressors: list[U8Compressor]) -> None:
        self.u8_blob = qscheme.quantize_as_u8(fp_tensor.detach())
        for compressor in u8_compressors:
            self.u8_blob = compressor.compress(self.u8_blob)
        self.qscheme = qscheme
        self.u8_compressors = u8_compressors

    @property
    def dequant_to_dtype(self) -> torch.dtype:
        """The dtype that the tensor acts as."""
        return self.dtype

    def decompress_to_u8(self) -> torch.Tensor:
        """Give the u8 values, uint8, of this shape."""
        values = self.u8_blob
        for compressor in reversed(self.u8_compressors):
            values = compressor.decompress(values)
        return values

    def decompress(self) -> torch.Tensor:
        """Give the float values, in `dequant_to_dtype`."""
        return self.qscheme.dequantize(self.decompress_to_u8(), self.dtype)

    def to_device(self, new_device: Any) -> Self:  # noqa: ANN401 - whatever torch takes as a device
        """Give the same tensor with its parts on `new_device`."""
        return self.to(new_device)  # type: ignore[return-value]

    def write_in_file(self, dirpath: str | Path, label: str) -> None:
        """Write `<dirpath>/<label>.dat` in the form that the inference engine reads. Called at NNEF write time."""
        raise UnsupportedOpError(
            f"{type(self).__name__} has no form of its own in NNEF; use QTensorTractScaleOnly, or its dense values"
        )

    def _to_base_tensor(self) -> torch.Tensor:
        return self.decompress()

    def _parts(self) -> dict[str, torch.Tensor]:
        return {"u8_blob": self.u8_blob}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        blob = parts["u8_blob"]
        result = self._shell(self.shape, dtype, blob.device, self.name)
        moved = blob.device != self.u8_blob.device
        result.u8_blob = blob
        result.qscheme = copy.copy(self.qscheme).to_device(blob.device) if moved else self.qscheme
        result.u8_compressors = [copy.copy(c).to_device(blob.device) if moved else c for c in self.u8_compressors]
        return result

    @property
    def opaque_nbytes(self) -> int:
        """Bytes of the u8 values and of what the scheme holds."""
        parts: Sequence[torch.Tensor] = [*self._parts().values(), *self.qscheme.tensors().values()]
        return sum(part.nbytes for part in parts)


class QTensorTract(QTensor):
    """All quantized tensors that have a block format of their own in tract's `.dat` files."""
