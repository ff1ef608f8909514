"""Int8Rows: int8 values with one f32 scale per row."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from typing_extensions import Self

from t2n_hf.contract import OffloadState, WeightFormat
from t2n_hf.errors import FormatError, QuantizationError
from t2n_hf.tensor import OpaqueTensor

__all__ = ["Int8Rows"]


@final
class Int8Rows(OpaqueTensor, WeightFormat):
    """A float tensor (..., N, K) as `q`, int8 of the same shape, and `scale`, f32 (..., N, 1): value = q * scale."""

    OFFLOAD_STATE_TAG = "t2n_hf_int8.int8_rows.v1"
    q: torch.Tensor
    scale: torch.Tensor  # type: ignore[assignment]

    @classmethod
    def of(cls, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, name: str = "") -> Self:
        """Make the tensor over its parts (shared), acting as `dtype`."""
        result = cls._shell(q.shape, dtype, q.device, name)
        result.q, result.scale = q, scale
        return result

    # ---- what t2n_hf asks of a format -----------------------------------------------------------------------------

    @classmethod
    def refuses(cls, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Any float tensor of at least 2 axes will do."""
        if not dtype.is_floating_point:
            return f"its dtype is {dtype}, not a float"
        return f"it has {len(shape)} axes; int8 rows need at least 2" if len(shape) < 2 else None

    @classmethod
    def packed_nbytes(cls, shape: Sequence[int]) -> int:
        """One byte for each value, 4 for each row."""
        return torch.Size(shape).numel() + 4 * torch.Size(shape[:-1]).numel()

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        importance: torch.Tensor | None = None,
    ) -> Self:
        """Quantize (..., N, K): the value of largest magnitude of each row becomes 127 or -127.

        There is nothing to choose: `importance` is not used.
        """
        reason = cls.refuses(tensor.shape, tensor.dtype)
        if reason is not None:
            raise QuantizationError(f"{name or 'a tensor'} cannot be int8 rows: {reason}")
        values = tensor.detach().float()
        scale = values.abs().amax(dim=-1, keepdim=True) / 127
        if not bool(torch.isfinite(scale).all()):
            raise QuantizationError(f"{name or 'a tensor'} has values that are NaN or infinite; it cannot be int8 rows")
        q = (values / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8)
        return cls.of(q, scale, dtype or tensor.dtype, name)

    # ---- its state ------------------------------------------------------------------------------------------------

    def to_offload_state(self) -> OffloadState:
        """The two parts, and the dtype that the tensor acts as."""
        meta = {"dtype": str(self.dtype).removeprefix("torch.")}
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors={"q": self.q, "scale": self.scale}, meta=meta)

    @classmethod
    def row_parts(cls, meta: Mapping[str, Any], shape: Sequence[int]) -> frozenset[str]:
        """Optional: both parts have the rows first, so that some of them can be read from disk alone."""
        return frozenset({"q", "scale"})

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> Self:  # noqa: ANN401
        """Rebuild from the two parts. Raises FormatError when they do not fit together."""
        q, scale = (state["tensors"].get(part) for part in ("q", "scale"))
        if q is None or scale is None or q.dtype != torch.int8 or scale.shape != (*q.shape[:-1], 1):
            found = {key: (str(part.dtype), tuple(part.shape)) for key, part in state["tensors"].items()}
            raise FormatError(f"int8 rows need parts 'q', int8 (..., N, K), and 'scale', (..., N, 1); got {found}")
        if target_device is not None:
            q, scale = q.to(target_device), scale.to(target_device)
        return cls.of(q, scale, getattr(torch, state["meta"]["dtype"]))

    # ---- its values -----------------------------------------------------------------------------------------------

    def _to_base_tensor(self) -> torch.Tensor:
        return (self.q * self.scale).to(self.dtype)

    def _parts(self) -> dict[str, torch.Tensor]:
        return {"q": self.q, "scale": self.scale}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return self.of(parts["q"], parts["scale"], dtype, self.name)

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        # Optional: without it the whole table would be made dense to read a few rows.
        return (F.embedding(indices, self.q) * F.embedding(indices, self.scale)).to(self.dtype)
