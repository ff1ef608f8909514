"""QTensorTractScaleOnly: Q4_0, the block format that tract multiplies and gathers. 4.5 bits per value.

At rest, and in memory until a fast product is asked for, a weight is one tensor of canonical blocks (`q4_0_blocks`).
The value of a weight is that of the exact path. `compute="fast"` (and "compiled") turns the blocks into a kernel's
layout, once, in place of the blocks and never beside them; canonical blocks come back from it bit for bit.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from typing_extensions import Self

from t2n_hf.contract import COMPUTE_MODES, InferenceTarget, OffloadState, WeightFormat
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.nnef.dat import Payload, q4_0_payload
from t2n_hf.tensor.opaque import overriding_compute
from t2n_hf.tensor.quant.compressors import U8Compressor
from t2n_hf.tensor.quant.importance import checked_importance
from t2n_hf.tensor.quant.kernels import Int4Kernel, KernelLayout, int4_kernel, int4_kernel_report, required_kernel
from t2n_hf.tensor.quant.native_quantize import quickly_quantized_rows
from t2n_hf.tensor.quant.packed_blocks import byte_chunks
from t2n_hf.tensor.quant.packed_rows import PackedRows, demand_blocks, row_chunks, why_no_blocks
from t2n_hf.tensor.quant.q4_0_blocks import (
    BLOCK_NBYTES,
    BLOCK_VALUES,
    blocks_from_quants,
    quants_of,
    scales_of,
)
from t2n_hf.tensor.quant.q4_0_search import quantize_weighted_rows
from t2n_hf.tensor.quant.q4_0_storage import BlockStorage
from t2n_hf.tensor.quant.qtensor import QTensorTract
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16, QScheme
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["QTensorTractScaleOnly"]

# How the names that `platform.machine()` gives on ARM begin.
_ARM: Final = ("arm", "aarch64")


def _storage_of_blocks(tensors: dict[str, torch.Tensor]) -> BlockStorage:
    blocks = tensors.get("q4_0")
    if blocks is None or blocks.dtype != torch.uint8 or blocks.ndim < 3 or blocks.shape[-1] != BLOCK_NBYTES:
        found = {key: (str(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors.items()}
        raise FormatError(f"a Q4_0 state holds one part 'q4_0', uint8 (..., N, K/32, {BLOCK_NBYTES}); got {found}")
    return BlockStorage(blocks, blocks.shape[-3])


def _storage_of_kernel(tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> BlockStorage:
    if meta["kernel"] != int4_kernel_report() or not {"packed", "scales"} <= tensors.keys():
        raise FormatError(
            f"a state in the layout of kernel {meta['kernel']!r} with parts {sorted(tensors)}; "
            f"this process has {int4_kernel_report()!r} and needs parts 'packed' and 'scales'"
        )
    return BlockStorage(KernelLayout(tensors["packed"], tensors["scales"]), int(meta["rows"]))


class QTensorTractScaleOnly(PackedRows, QTensorTract, WeightFormat):
    """A weight (..., N, K), K % 32 == 0, in Q4_0.

    State: one part, `q4_0`, uint8 (..., N, K/32, 18), and `dtype` in its meta. Every tensor object over one weight (an
    alias, another dtype, a tied parameter) shares one table, which serves gather and matmul in both layouts.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.q4_0.v1"
    EXPORT_FORMAT: ClassVar[str] = "q4_0"
    _storage: BlockStorage
    _compute: str
    specific_machine: str | None

    def __new__(
        cls,
        fp_tensor: torch.Tensor,
        qscheme: QScheme | None = None,
        dequant_to_dtype: torch.dtype = torch.float32,
        u8_compressors: list[U8Compressor] | None = None,
        *,
        specific_machine: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Quantize `fp_tensor` with the scales of `qscheme`, a QScalePerGroupF16 of 4 bits and groups of 32.

        `quantize` chooses the scales itself. `u8_compressors` are accepted and not needed: blocks are packed already.
        `specific_machine`, a name as `platform.machine()` gives it, only concerns `decompress`. Raises ConfigError for
        another scheme, QuantizationError for a shape that does not divide into groups along its last axis.
        """
        result = super().__new__(cls, fp_tensor, qscheme, dequant_to_dtype, u8_compressors, requires_grad=requires_grad)
        if qscheme is not None:
            result.specific_machine = specific_machine
        return result

    def _fill(self, fp_tensor: torch.Tensor, qscheme: QScheme, u8_compressors: list[U8Compressor]) -> None:
        if not isinstance(qscheme, QScalePerGroupF16) or (qscheme.n_bits, qscheme.group_size) != (4, BLOCK_VALUES):
            raise ConfigError(f"Q4_0 needs QScalePerGroupF16(group_size=32, n_bits=4), got {qscheme!r}")
        demand_blocks("Q4_0", BLOCK_VALUES, fp_tensor)
        scales = qscheme.scale.reshape(*fp_tensor.shape[:-1], -1)
        blocks = blocks_from_quants(qscheme.quantize_as_u8(fp_tensor.detach()), scales.to(fp_tensor.device))
        self._hold(BlockStorage(blocks, blocks.shape[-3]), "exact")

    @classmethod
    def _over(cls, storage: BlockStorage, dtype: torch.dtype, compute: str = "exact", name: str = "") -> Self:
        result = cls._shell(storage.shape, dtype, storage.device, name)
        result._hold(storage, compute)
        return result

    def _like(self, storage: BlockStorage, dtype: torch.dtype, compute: str) -> Self:
        result = self._over(storage, dtype, compute, self._name)
        result.specific_machine = self.specific_machine
        return result

    def _hold(self, storage: BlockStorage, compute: str) -> None:
        self._storage, self._compute, self.specific_machine = storage, compute, None
        self._note_sizes()

    # ---- WeightFormat ---------------------------------------------------------------------------------------------

    @classmethod
    def refuses(cls, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Say why Q4_0 cannot hold a tensor of this shape and dtype; None when it can."""
        return why_no_blocks("Q4_0", BLOCK_VALUES, shape, dtype)

    @classmethod
    def packed_nbytes(cls, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape at rest: 18 for each 32 values."""
        return torch.Size(shape).numel() // BLOCK_VALUES * BLOCK_NBYTES

    @classmethod
    def resident_nbytes(cls, shape: Sequence[int], compute: str) -> int:
        """Bytes in memory: as at rest, or those of the kernel's layout where there is one and it is used."""
        kernel = int4_kernel() if compute != "exact" else None
        return cls.packed_nbytes(shape) if kernel is None else kernel.nbytes(shape)

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        importance: torch.Tensor | None = None,
    ) -> Self:
        """Quantize a plain float tensor (..., N, K), a few rows at a time.

        See `quantize_rows` for the rule, and `quantize_weighted_rows` for that with `importance`, f32 (K,). Raises
        QuantizationError, naming `name`, for a shape that does not fit, NaN, infinity, or a value too large.
        """
        demand_blocks("Q4_0", BLOCK_VALUES, tensor, name)
        groups = tensor.shape[-1] // BLOCK_VALUES
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        if importance is None and tensor.device.type != "meta":
            blocks = quickly_quantized_rows(rows, name)
        else:
            blocks = torch.empty(rows.shape[0], groups, BLOCK_NBYTES, dtype=torch.uint8, device=tensor.device)
        if importance is not None and tensor.device.type != "meta":
            importance = checked_importance(importance, rows.shape[1], name)
            for start, stop in row_chunks(*rows.shape):
                blocks[start:stop] = quantize_weighted_rows(rows[start:stop], importance, name)
        blocks = blocks.view(*tensor.shape[:-1], groups, BLOCK_NBYTES)
        return cls._over(BlockStorage(blocks, blocks.shape[-3]), dtype or tensor.dtype, name=name)

    def with_compute(self, compute: str) -> Self:
        """Give the same weight (one table) set to compute "exact", "fast" or "compiled".

        Where this machine has no kernel, "fast" computes exactly: `int4_kernel_report()` says why. "compiled" is "fast"
        with native code where rows are made dense (prompts); without a compiler it is "fast", with a warning.
        """
        if compute not in COMPUTE_MODES:
            raise ConfigError(f"compute={compute!r}; expected one of {', '.join(COMPUTE_MODES)}")
        return self._like(self._storage, self.dtype, compute)

    @property
    def compute(self) -> str:
        """What the weight is set to: "exact", "fast" or "compiled". A `compute_mode` scope goes before it."""
        return self._compute

    def pack_for_kernel(self) -> bool:
        """Take the kernel's layout now, instead of at the first fast product; say whether there is one. Thread-safe."""
        return self._storage.kernel_layout() is not None

    # ---- SupportsOffloadState -------------------------------------------------------------------------------------

    def to_offload_state(self) -> OffloadState:
        """Give the canonical blocks: shared while they are held, made again from a kernel's layout."""
        meta = {"dtype": dtype_of(self.dtype).torch, **self._machine_meta()}
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors={"q4_0": self._storage.canonical()}, meta=meta)

    def to_private_state(self) -> OffloadState:
        """Give what is held as it is, for a spill of this process: parts `packed` and `scales` in a kernel's layout."""
        held, state = self._storage.held, OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors=self._parts(), meta={})
        state["meta"].update(dtype=dtype_of(self.dtype).torch, compute=self._compute, **self._machine_meta())
        if isinstance(held, KernelLayout):
            state["meta"].update(kernel=int4_kernel_report(), rows=self._storage.rows)
        return state

    def _machine_meta(self) -> dict[str, str]:
        return {} if self.specific_machine is None else {"specific_machine": self.specific_machine}

    @classmethod
    def row_parts(cls, meta: Mapping[str, Any], shape: Sequence[int]) -> frozenset[str]:
        """Canonical blocks lie row after row; a kernel's layout interleaves rows, and keeps experts apart."""
        if "kernel" in meta:
            return frozenset({"packed", "scales"}) if len(shape) > 2 else frozenset()
        return frozenset({"q4_0"})

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> Self:  # noqa: ANN401
        """Rebuild the weight over the state's own tensors (no copy), or over copies on `target_device`.

        Raises FormatError when the state does not hold Q4_0 blocks, or another machine's layout of them.
        """
        tensors, meta = state["tensors"], state["meta"]
        dtype = getattr(torch, dtype_named(str(meta.get("dtype", "float32"))).torch)
        storage = _storage_of_kernel(tensors, meta) if "kernel" in meta else _storage_of_blocks(tensors)
        if target_device is not None and torch.device(target_device) != storage.device:
            storage = BlockStorage(storage.canonical().to(target_device), storage.rows)
        result = cls._over(storage, dtype, meta.get("compute", "exact"))
        result.specific_machine = meta.get("specific_machine")
        return result

    @classmethod
    def dat_payload(cls, state: OffloadState, target: InferenceTarget) -> Payload:
        """Say what the `.dat` holds: the canonical blocks as they are."""
        weight = cls.from_offload_state(state)
        blocks = weight._storage.canonical()
        return q4_0_payload(tuple(weight.shape), lambda: byte_chunks(blocks))

    # ---- values ---------------------------------------------------------------------------------------------------

    @property
    def q4_0(self) -> torch.Tensor:
        """The canonical blocks, uint8 (..., N, K/32, 18); a copy when a kernel's layout is held."""
        return self._storage.canonical()

    @property
    def packed(self) -> torch.Tensor:
        """The quants in the kernel's layout. Raises FormatError when canonical blocks are held."""
        return self._held_layout().packed

    @property
    def scales(self) -> torch.Tensor:
        """The scales in the kernel's layout. Raises FormatError when canonical blocks are held."""
        return self._held_layout().scales

    def _held_layout(self) -> KernelLayout:
        held = self._storage.held
        if not isinstance(held, KernelLayout):
            raise FormatError(f"{self.name or 'the weight'} holds canonical blocks, not a kernel's layout")
        return held

    @property
    def qscheme(self) -> QScheme:  # type: ignore[override]
        """The scales as a scheme."""
        return QScalePerGroupF16(BLOCK_VALUES, scales_of(self.q4_0), 4)

    def decompress_to_u8(self) -> torch.Tensor:
        """Give the quants one per byte: uint8 of this shape, each below 16."""
        return quants_of(self.q4_0).reshape(self.shape)

    def decompress(self) -> torch.Tensor:
        """Give the values as tract computes them: in f16 on ARM, in f32 elsewhere; then in the dtype it acts as.

        The machine is `specific_machine` ("aarch64", "arm64", "armv7l", "x86_64"...), None means this one. The values
        of `to_base_tensor`, and of every product, are those of f32 on any machine.
        """
        if (self.specific_machine or platform.machine()).lower().startswith(_ARM):
            return self.qscheme.dequantize(self.decompress_to_u8(), torch.float16).to(self.dtype)
        return self.to_base_tensor()

    def _to_base_tensor(self) -> torch.Tensor:
        return self._storage.dense(torch.empty(self.shape, dtype=self.dtype, device=self.device))

    @property
    def opaque_nbytes(self) -> int:
        """Bytes held: 18 for each 32 values; 18 to 20 in a kernel's layout, whose rows are padded to 64s."""
        return sum(part.nbytes for part in self._parts().values())

    # ---- what OpaqueTensor asks for -------------------------------------------------------------------------------

    def _parts(self) -> dict[str, torch.Tensor]:
        held = self._storage.held
        return {"packed": held.packed, "scales": held.scales} if isinstance(held, KernelLayout) else {"q4_0": held}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        held = parts["q4_0"] if "q4_0" in parts else KernelLayout(parts["packed"], parts["scales"])
        return self._like(BlockStorage(held, self._storage.rows), dtype, self._compute)

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return self._like(self._storage, dtype, self._compute)

    def _alias(self) -> Self:
        return self._with_dtype(self.dtype)

    def _to_device(self, device: torch.device) -> Self:
        moved = BlockStorage(self._storage.canonical().to(device), self._storage.rows)
        return self._like(moved, self.dtype, self._compute)

    def _transposed(self) -> TransposedTensor:
        return TransposedTensor.over(self)

    # ---- products and rows ----------------------------------------------------------------------------------------

    def _mode(self) -> str:
        return overriding_compute() or self._compute

    def _fast_layout(self) -> KernelLayout | None:
        return self._storage.kernel_layout() if (overriding_compute() or self._compute) != "exact" else None

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Decoding runs this once for each matrix and token: what is looked up here shows in tokens per second.
        mode = overriding_compute() or self._compute
        if mode != "exact" and x.dtype is self._acts_as:
            layout, shape, columns = self._storage.kernel_layout(), x.shape, self._sizes[-1]
            if layout is not None and shape[-1] == columns:
                kernel, count = required_kernel(), shape.numel() // columns
                if count == 1 or count <= kernel.product_rows(mode == "compiled"):
                    result = self._fast_product(kernel, x if len(shape) == 2 else x.reshape(count, columns), layout)
                    if bias is not None:
                        result = result + bias
                    return result if len(shape) == 2 else result.view(*shape[:-1], self._sizes[-2])
        return super()._linear(x, bias)

    def _fast_product(self, kernel: Int4Kernel, x: torch.Tensor, layout: KernelLayout) -> torch.Tensor:
        dtype, rows = self._acts_as, self._sizes[-2]
        result = kernel.matmul(x if dtype is torch.bfloat16 else x.to(torch.bfloat16), layout)
        if result.shape[1] != rows:
            result = result[:, :rows]
        return result if dtype is torch.bfloat16 else result.to(dtype)

    def _dense_rows(self, start: int, stop: int) -> torch.Tensor:
        return self._storage.dense_rows(start, stop, self._acts_as, native=self._mode() == "compiled")

    def _dense_rows_at(self, rows: torch.Tensor) -> torch.Tensor:
        return self._storage.gather(rows, self._acts_as)

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        self._fast_layout()
        return super()._gather(indices)

    def _item_at(self, index: int) -> torch.Tensor:
        self._fast_layout()
        return self._over(self._storage.item(index), self._acts_as, self._compute, self._item_name(index))
