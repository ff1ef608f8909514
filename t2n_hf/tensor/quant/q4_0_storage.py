"""The memory of one Q4_0 weight: canonical blocks or a kernel's layout, one of them at a time, read the same way."""

import threading

import torch

from t2n_hf.tensor.quant.kernels import KernelLayout, int4_kernel, required_kernel
from t2n_hf.tensor.quant.packed_rows import ROW_MULTIPLE, row_chunks
from t2n_hf.tensor.quant.q4_0_blocks import (
    BLOCK_NBYTES,
    BLOCK_VALUES,
    blocks_from_quants,
    dequantize_blocks,
    dequantize_quants,
    quants_of,
    scales_of,
)

__all__ = ["BlockStorage"]


class BlockStorage:
    """The blocks of one weight (..., N, K); shared by every tensor object over the same weight.

    `held` is canonical blocks, uint8 (..., N, K/32, 18), or a KernelLayout with the same leading axes. It is replaced
    as a whole, so that a reader in another thread keeps what it took.
    """

    def __init__(self, held: torch.Tensor | KernelLayout, rows: int) -> None:
        self.held = held
        self.rows = rows
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        held = self.held
        return held.packed.device if isinstance(held, KernelLayout) else held.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        held = self.held
        if isinstance(held, KernelLayout):
            return (*held.packed.shape[:-2], self.rows, held.packed.shape[-1] * 2)
        return (*held.shape[:-2], held.shape[-2] * BLOCK_VALUES)

    def kernel_layout(self) -> KernelLayout | None:
        """Give the kernel's layout, packing the blocks at the first call; None where no kernel takes them."""
        held = self.held
        if isinstance(held, KernelLayout):
            return held
        # Only plain tensors are packed: a fake one has no bytes, and its layout would be kept for ever.
        if held.device.type != "cpu" or type(held) is not torch.Tensor or int4_kernel() is None:
            return None
        with self._lock:
            if not isinstance(self.held, KernelLayout):
                self.held = _packed(self.held)
            return self.held

    def canonical(self) -> torch.Tensor:
        """Give canonical blocks: the ones held, or new ones made from the kernel's layout, bit for bit."""
        held = self.held
        if not isinstance(held, KernelLayout):
            return held
        shape = self.shape
        blocks = held.packed.new_empty(*shape[:-1], shape[-1] // BLOCK_VALUES, BLOCK_NBYTES)
        if len(shape) > 2:
            for index in range(shape[0]):
                blocks[index] = self.item(index).canonical()
            return blocks
        for start, stop in row_chunks(*shape):
            quants, scales = self.read(start, stop)
            blocks[start:stop] = blocks_from_quants(quants.flatten(-2), scales)
        return blocks

    def item(self, index: int) -> "BlockStorage":
        """Give the weight at `index` of the first axis, over the same memory."""
        held = self.held
        if isinstance(held, KernelLayout):
            return BlockStorage(KernelLayout(held.packed[index], held.scales[index]), self.rows)
        return BlockStorage(held[index], self.rows)

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give quants, uint8 (rows, K/32, 32), and scales, f16 (rows, K/32), of a 2-D weight; fresh memory."""
        held = self.held
        if not isinstance(held, KernelLayout):
            return quants_of(held[start:stop]), scales_of(held[start:stop])
        skipped = start % ROW_MULTIPLE
        quants, scales = required_kernel().unpack(held, start - skipped, stop)
        return quants[skipped:], scales[skipped:]

    def dense_rows(self, start: int, stop: int, dtype: torch.dtype, *, native: bool = False) -> torch.Tensor:
        """Dequantize rows start..stop of a 2-D weight: (rows, K) in `dtype`. `native`: see Int4Kernel.dense."""
        held = self.held
        if not isinstance(held, KernelLayout):
            return dequantize_blocks(held[start:stop], dtype)
        skipped = start % ROW_MULTIPLE
        return required_kernel().dense(held, start - skipped, stop, dtype, native=native)[skipped:]

    def gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the rows at `rows`, i64 (T,), of a 2-D weight: (T, K). Raises IndexError outside 0..N-1."""
        held = self.held
        if isinstance(held, KernelLayout):
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
                raise IndexError(f"index out of range: rows {int(rows.min())} to {int(rows.max())} of {self.rows}")
            return dequantize_quants(*required_kernel().gather(held, rows), dtype)
        return dequantize_blocks(held.index_select(0, rows), dtype)

    def dense(self, out: torch.Tensor) -> torch.Tensor:
        """Dequantize the whole weight into `out`, in chunks."""
        if len(self.shape) > 2:
            for index in range(out.shape[0]):
                self.item(index).dense(out[index])
            return out
        for start, stop in row_chunks(*self.shape):
            out[start:stop] = self.dense_rows(start, stop, out.dtype)
        return out


def _packed(blocks: torch.Tensor) -> KernelLayout:
    if blocks.ndim == 3:
        return required_kernel().pack(blocks)
    layouts = map(_packed, blocks)
    first = next(layouts)
    packed, scales = (part.new_empty(len(blocks), *part.shape) for part in first)
    packed[0], scales[0] = first
    for index, layout in enumerate(layouts, start=1):
        packed[index], scales[index] = layout
    return KernelLayout(packed, scales)
