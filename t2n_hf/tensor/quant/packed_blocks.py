"""PackedBlocks: weights whose values stand in blocks of one f16 scale and a fixed number of bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from typing_extensions import Self

from t2n_hf.contract import InferenceTarget, OffloadState, WeightFormat
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.errors import FormatError, QuantizationError, UnsupportedOpError
from t2n_hf.nnef.dat import Payload, dense_payload
from t2n_hf.tensor.quant.importance import checked_importance
from t2n_hf.tensor.quant.packed_rows import PackedRows, demand_blocks, row_chunks, why_no_blocks
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["PackedBlocks", "byte_chunks"]

_PAYLOAD_CHUNK_BYTES: Final = 8 << 20


def byte_chunks(values: torch.Tensor) -> Iterator[memoryview]:
    """Give the bytes of a contiguous uint8 tensor, in pieces of 8 MiB at most."""
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _PAYLOAD_CHUNK_BYTES):
        yield memoryview(flat[start : start + _PAYLOAD_CHUNK_BYTES].cpu().numpy()).cast("B")  # type: ignore[arg-type]


class PackedBlocks(PackedRows, WeightFormat):
    """Abstract: a weight (..., N, K), whose rows are blocks of `BLOCK_VALUES` values in `BLOCK_NBYTES` bytes.

    Each block begins with its scale, f16. State: one part named `PART`, uint8 (..., N, K/values, bytes), and `dtype` in
    its meta. A concrete class sets the four names, and says what is in a block: `_blocks_of` and `_values_of`.
    """

    PART: ClassVar[str]
    LABEL: ClassVar[str]
    BLOCK_VALUES: ClassVar[int]
    BLOCK_NBYTES: ClassVar[int]
    _blocks: torch.Tensor

    @classmethod
    def _blocks_of(cls, values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        """Pack `values`, finite f32 (R, B, BLOCK_VALUES), into uint8 (R, B, BLOCK_NBYTES).

        `importance` is f32 (B, BLOCK_VALUES), or None. A scale that f16 cannot hold may come out infinite: the caller
        refuses it.
        """
        raise UnsupportedOpError(f"{cls.__name__} cannot quantize; define _blocks_of()")

    @classmethod
    def _values_of(cls, blocks: torch.Tensor) -> torch.Tensor:
        """Unpack uint8 (..., BLOCK_NBYTES) into f32 (..., BLOCK_VALUES), in fresh memory."""
        raise UnsupportedOpError(f"{cls.__name__} does not give its values; define _values_of()")

    @classmethod
    def _over(cls, blocks: torch.Tensor, dtype: torch.dtype, name: str = "") -> Self:
        *rows, groups, _ = blocks.shape
        result = cls._shell((*rows, groups * cls.BLOCK_VALUES), dtype, blocks.device, name)
        result._hold(blocks)
        return result

    def _hold(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._note_sizes()

    # ---- WeightFormat ---------------------------------------------------------------------------------------------

    @classmethod
    def refuses(cls, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Say why the format cannot hold a tensor of this shape and dtype; None when it can."""
        return why_no_blocks(cls.LABEL, cls.BLOCK_VALUES, shape, dtype)

    @classmethod
    def packed_nbytes(cls, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape, at rest and in memory: `BLOCK_NBYTES` for each `BLOCK_VALUES` values."""
        return torch.Size(shape).numel() // cls.BLOCK_VALUES * cls.BLOCK_NBYTES

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        importance: torch.Tensor | None = None,
    ) -> Self:
        """Quantize a plain float tensor (..., N, K), a few rows at a time. `tensor` is not modified.

        Raises QuantizationError, naming `name`, for a shape that does not fit, NaN, infinity, or a value whose scale
        f16 cannot hold.
        """
        demand_blocks(cls.LABEL, cls.BLOCK_VALUES, tensor, name)
        columns = tensor.shape[-1]
        groups = columns // cls.BLOCK_VALUES
        if importance is not None:
            importance = checked_importance(importance, columns, name).to(tensor.device).view(groups, -1)
        blocks = torch.empty(*tensor.shape[:-1], groups, cls.BLOCK_NBYTES, dtype=torch.uint8, device=tensor.device)
        if tensor.device.type != "meta":
            rows, target = tensor.detach().reshape(-1, columns), blocks.view(-1, groups, cls.BLOCK_NBYTES)
            for start, stop in row_chunks(*rows.shape):
                values = rows[start:stop].to(torch.float32).contiguous().unflatten(-1, (groups, -1))
                target[start:stop] = cls._checked_blocks_of(values, importance, name)
        return cls._over(blocks, dtype or tensor.dtype, name)

    @classmethod
    def _checked_blocks_of(cls, values: torch.Tensor, importance: torch.Tensor | None, name: str) -> torch.Tensor:
        where = name or "the tensor"
        low, high = torch.aminmax(values)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise QuantizationError(
                f"{where} has {int((~torch.isfinite(values)).sum())} values that are NaN or infinite and cannot be "
                f"quantized to {cls.LABEL}; repair the checkpoint, or list its module in modules_to_not_convert"
            )
        blocks = cls._blocks_of(values, importance)
        scales = blocks[..., :2].contiguous().view(torch.float16)
        if not bool(torch.isfinite(scales).all()):
            raise QuantizationError(
                f"{where} has a value of magnitude {float(values.abs().max()):g}, for which {cls.LABEL} would need a "
                "scale beyond 65504, the largest of f16; rescale it, or list its module in modules_to_not_convert"
            )
        return blocks

    # ---- SupportsOffloadState -------------------------------------------------------------------------------------

    def to_offload_state(self) -> OffloadState:
        """Give the blocks (shared), and the dtype that the tensor acts as."""
        meta = {"dtype": dtype_of(self._acts_as).torch}
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors=self._parts(), meta=meta)

    @classmethod
    def row_parts(cls, meta: Mapping[str, Any], shape: Sequence[int]) -> frozenset[str]:
        """The blocks of a row stand together."""
        return frozenset({cls.PART})

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> Self:  # noqa: ANN401
        """Rebuild the weight over the state's own blocks (no copy), or over copies on `target_device`.

        Raises FormatError when the state does not hold blocks of this format.
        """
        blocks = state["tensors"].get(cls.PART)
        if blocks is None or blocks.dtype != torch.uint8 or blocks.ndim < 3 or blocks.shape[-1] != cls.BLOCK_NBYTES:
            found = {key: (str(tensor.dtype), tuple(tensor.shape)) for key, tensor in state["tensors"].items()}
            raise FormatError(
                f"a {cls.LABEL} state holds one part {cls.PART!r}, uint8 (..., N, K/{cls.BLOCK_VALUES}, "
                f"{cls.BLOCK_NBYTES}); got {found}"
            )
        dtype = getattr(torch, dtype_named(str(state["meta"].get("dtype", "float32"))).torch)
        return cls._over(blocks if target_device is None else blocks.to(target_device), dtype)

    @classmethod
    def dat_payload(cls, state: OffloadState, target: InferenceTarget) -> Payload:
        """Say what the `.dat` holds: the dense values in `target.dtype`, made a few rows at a time."""
        weight = cls.from_offload_state(state, "cpu")
        return dense_payload(tuple(weight.shape), target.dtype, weight._value_chunks(target.dtype))

    def _value_chunks(self, dtype: str) -> Callable[[], Iterator[memoryview]]:
        wanted = getattr(torch, dtype_named(dtype).torch)

        def chunks() -> Iterator[memoryview]:
            rows = self._blocks.flatten(0, -3)
            for start, stop in row_chunks(len(rows), self._sizes[-1]):
                values = self._values_of(rows[start:stop]).to(wanted)
                yield memoryview(values.contiguous().numpy()).cast("B")  # type: ignore[arg-type]

        return chunks

    # ---- what OpaqueTensor and PackedRows ask for -----------------------------------------------------------------

    def _parts(self) -> dict[str, torch.Tensor]:
        return {self.PART: self._blocks}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return self._over(parts[self.PART], dtype, self._name)

    @property
    def opaque_nbytes(self) -> int:
        """Bytes of the blocks."""
        return self._blocks.nbytes

    def _to_base_tensor(self) -> torch.Tensor:
        dense = torch.empty(self._sizes, dtype=self._acts_as, device=self._blocks.device)
        rows, target = self._blocks.flatten(0, -3), dense.view(-1, self._sizes[-1])
        for start, stop in row_chunks(*target.shape):
            target[start:stop] = self._values_of(rows[start:stop]).flatten(-2)
        return dense

    def _dense_rows(self, start: int, stop: int) -> torch.Tensor:
        return self._values_of(self._blocks[start:stop]).flatten(-2).to(self._acts_as)

    def _dense_rows_at(self, rows: torch.Tensor) -> torch.Tensor:
        return self._values_of(self._blocks.index_select(0, rows)).flatten(-2).to(self._acts_as)

    def _transposed(self) -> TransposedTensor:
        return TransposedTensor.over(self)

    def _item_at(self, index: int) -> Self:
        return self._over(self._blocks[index], self._acts_as, self._item_name(index))
