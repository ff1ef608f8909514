"""QTensor: an opaque tensor whose values are small unsigned integers under a quantization scheme."""

import math
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.errors import FormatError, UnsupportedOpError
from t2n_hf.tensor.quant.compressors import U8Compressor
from t2n_hf.tensor.quant.described import Described
from t2n_hf.tensor.quant.scheme import QScheme
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["QTensor", "QTensorTract"]


class QTensor(OpaqueTensor, SupportsOffloadState):
    """Common interface of quantized tensors; by itself, u8 values under any `QScheme`, through any `U8Compressor`.

    It can be offloaded and saved when its scheme and its compressors have names, see `Described`; then its state holds
    `u8`, and the tensors of the scheme and of compressor i as `scheme_*` and `compressor<i>_*`. Every use makes all of
    it dense. Formats with a layout of their own (`QTensorTractScaleOnly`) derive from it and keep their own parts.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.qtensor.v1"
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
        requires_grad: bool | None = None,
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
        """Give the u8 values, uint8, of this shape. Raises FormatError when compressors give another number of them."""
        values = self.u8_blob
        if values.is_meta:  # compressors read lengths from the bytes
            return torch.empty(self.shape, dtype=torch.uint8, device=values.device)
        for compressor in reversed(self.u8_compressors):
            values = compressor.decompress(values)
        if values.numel() != math.prod(self.shape):
            raise FormatError(f"{self.name or 'a QTensor'} of shape {tuple(self.shape)} holds {values.numel()} values")
        return values.reshape(self.shape)

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

    # ---- SupportsOffloadState -------------------------------------------------------------------------------------

    def to_offload_state(self) -> OffloadState:
        """Give the u8 values as they are held, and what scheme and compressors are.

        Raises UnsupportedOpError when one of them has no name, or for a class that derives from this one and has no
        state of its own.
        """
        if "OFFLOAD_STATE_TAG" not in type(self).__dict__:
            raise UnsupportedOpError(
                f"{type(self).__name__} derives from QTensor and does not say its own state; give it an "
                "OFFLOAD_STATE_TAG, to_offload_state() and from_offload_state()"
            )
        holders: list[tuple[str, Described]] = [("scheme", self.qscheme)]
        holders += [(f"compressor{place}", compressor) for place, compressor in enumerate(self.u8_compressors)]
        tensors = {f"{prefix}_{key}": part for prefix, held in holders for key, part in held.tensors().items()}
        meta = {
            "dtype": dtype_of(self.dtype).torch,
            "shape": list(self.shape),
            "scheme": self.qscheme.description(),
            "compressors": [compressor.description() for compressor in self.u8_compressors],
        }
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors={"u8": self.u8_blob, **tensors}, meta=meta)

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> Self:  # noqa: ANN401
        """Rebuild the tensor over the state's own tensors, or over copies on `target_device`.

        Raises FormatError when parts are missing or do not fit together, or nothing in this process has a name that is
        in it.
        """
        meta, tensors = state["meta"], dict(state["tensors"])
        if target_device is not None:
            tensors = {key: part.to(target_device) for key, part in tensors.items()}
        blob, shape, listed = tensors.get("u8"), meta.get("shape"), meta.get("compressors")
        if blob is None or blob.dtype is not torch.uint8 or not _is_shape(shape) or not isinstance(listed, list):
            raise FormatError(
                f"a QTensor state holds a part 'u8', uint8, and in its meta dtype, shape, scheme and compressors; got "
                f"parts {sorted(tensors)} and {sorted(meta)}"
            )
        dtype = getattr(torch, dtype_named(str(meta.get("dtype", "float32"))).torch)
        result = cls._shell(shape, dtype, blob.device)
        result.u8_blob = blob
        result.qscheme = QScheme.rebuilt(meta.get("scheme"), _tensors_of("scheme", tensors))
        result.u8_compressors = [
            U8Compressor.rebuilt(described, _tensors_of(f"compressor{place}", tensors))
            for place, described in enumerate(listed)
        ]
        result.decompress_to_u8()  # what does not fit together is found here, not at the first use
        return result

    # ---- what OpaqueTensor asks for -------------------------------------------------------------------------------

    def _to_base_tensor(self) -> torch.Tensor:
        return self.decompress()

    def _holders(self) -> dict[str, Described]:
        compressors: dict[str, Described] = {f"compressor{place}": c for place, c in enumerate(self.u8_compressors)}
        return {"scheme": self.qscheme, **compressors}

    def _parts(self) -> dict[str, torch.Tensor]:
        held = {f"{prefix}_{key}": part for prefix, h in self._holders().items() for key, part in h.tensors().items()}
        return {"u8_blob": self.u8_blob, **held}

    def __getattr__(self, name: str) -> torch.Tensor:
        # Parts are attributes to those that take a tensor apart; what scheme and compressors hold is found here.
        part = self._parts().get(name) if name.startswith(("scheme_", "compressor")) else None
        if part is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return part

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        blob = parts["u8_blob"]
        result = self._shell(self.shape, dtype, blob.device, self.name)
        result.u8_blob = blob
        made: dict[str, Any] = {key: h.over(_tensors_of(key, parts)) for key, h in self._holders().items()}
        result.qscheme, *result.u8_compressors = made.values()
        return result


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(length, int) and length >= 0 for length in value)


def _tensors_of(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{prefix}_"): part for key, part in tensors.items() if key.startswith(f"{prefix}_")}


class QTensorTract(QTensor):
    """All quantized tensors that have a block format of their own in tract's `.dat` files."""

    def write_in_file(self, dirpath: str | Path, label: str) -> None:
        """Write `<dirpath>/<label>.dat` as tract reads it."""
        self.write_offload_state_in_file(self.to_offload_state(), dirpath, label)
