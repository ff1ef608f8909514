"""The seam between Q4_0 weights and a fast product: a kernel, its own layout, and the way back to canonical blocks.

A kernel's layout depends on the machine (for torch's CPU kernel, on the instruction set), so it never leaves the
process: canonical blocks are packed into it, and come back bit for bit. Before a kernel is offered, its layout is
probed on a small pattern; where the probe fails there is no fast path, `int4_kernel()` is None, and
`int4_kernel_report()` says why.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.tensor.quant.kernel_scales import halves_at, kernel_pairs, put_scales, scales_at, scales_form
from t2n_hf.tensor.quant.native import NativeDense, native_dense
from t2n_hf.tensor.quant.packed_rows import ROW_MULTIPLE
from t2n_hf.tensor.quant.q4_0_blocks import (
    BLOCK_VALUES,
    blocks_from_quants,
    dequantize_quants,
    scale_raised,
    scales_of,
)

__all__ = [
    "Int4Kernel",
    "KernelLayout",
    "TorchInt4Kernel",
    "int4_kernel",
    "int4_kernel_report",
    "native_reader",
    "native_report",
    "required_kernel",
]

# Rows packed at once: bounds the transient to a few MiB at the widths that models have.
_PACK_ROWS: Final = 512
_LOW_NIBBLES: Final = 0x0F0F0F0F0F0F0F0F


class KernelLayout(NamedTuple):
    """One weight (N, K) for a kernel: quants, uint8 (Np, K/2), where Np is N padded to 64, and scales.

    Scales are bf16 (K/32, Np, 2) as the kernel wants them, or f16 (slices, K/32, rows): see kernel_scales.
    """

    packed: torch.Tensor
    scales: torch.Tensor


class Int4Kernel(Protocol):
    """What a fast product for Q4_0 must offer."""

    @property
    def name(self) -> str:
        """Tells layouts apart."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the layout of a weight of this shape, (..., N, K)."""

    def pack(self, blocks: torch.Tensor) -> KernelLayout:
        """Repack canonical blocks, uint8 (N, K/32, 18)."""

    def unpack(self, layout: KernelLayout, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give quants, uint8 (rows, K/32, 32), and scales, f16 (rows, K/32), of rows start..stop; start % 64 == 0."""

    def dense(
        self, layout: KernelLayout, start: int, stop: int, dtype: torch.dtype, *, native: bool = False
    ) -> torch.Tensor:
        """Give the values of rows start..stop, exact in f32, then rounded to `dtype`: (rows, K); start % 64 == 0.

        `native` allows code compiled on this machine, where there is any; the values are the same.
        """

    def product_rows(self, native: bool) -> int:
        """Rows of x up to which `matmul` is faster than a product with what `dense` gives."""

    def gather(self, layout: KernelLayout, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give quants, uint8 (T, K/32, 32), and scales, f16 (T, K/32), of the rows at `rows`, i64 (T,)."""

    def matmul(self, x: torch.Tensor, layout: KernelLayout) -> torch.Tensor:
        """Compute x @ weight.T for x, bf16 (M, K): bf16 (M, Np)."""


@dataclass(frozen=True)
class TorchInt4Kernel:
    """`torch._weight_int4pack_mm_for_cpu`. Groups of `width` rows are packed together, column by column.

    byte [group, k, j] = q[row j, k] | q[row j + width/2, k] << 4.
    """

    width: int

    @property
    def name(self) -> str:
        """Layouts of different widths are different layouts."""
        return f"torch_int4pack_{self.width}"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the layout of a weight of this shape, (..., N, K): a half per value, and those of the scales."""
        *lead, rows, columns = shape
        padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        scales, dtype = scales_form(rows, columns)
        return math.prod(lead) * (padded * columns // 2 + math.prod(scales) * dtype.itemsize)

    def pack(self, blocks: torch.Tensor) -> KernelLayout:
        """Repack canonical blocks, uint8 (N, K/32, 18), a few rows at a time."""
        count, groups, _ = blocks.shape
        padded = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        packed = blocks.new_empty(padded, groups * BLOCK_VALUES // 2)
        shape, dtype = scales_form(count, groups * BLOCK_VALUES)
        scales = blocks.new_zeros(shape, dtype=dtype)
        for start in range(0, padded, _PACK_ROWS):
            part = blocks[start : start + _PACK_ROWS]
            stop = min(start + _PACK_ROWS, padded)
            self._pack_quants(part[..., 2:], packed[start:stop])
            put_scales(scales, start, scales_of(part))
        return KernelLayout(packed, scales)

    def _pack_quants(self, quants: torch.Tensor, out: torch.Tensor) -> None:
        """Repack the quants of blocks, uint8 (rows, K/32, 16), into `out`, uint8 (rows padded with 8, K/2)."""
        count, blocks, _ = quants.shape
        # Eight bytes at a time, as in q4_0_blocks: q[i] and q[i + 16] of a row become q[i] of two rows, and q[i + 16].
        bytes_ = out.new_empty(out.shape[0], blocks, BLOCK_VALUES // 2)
        bytes_[:count], bytes_[count:] = quants, 0x88
        first, second = bytes_.view(torch.int64).view(-1, 2, self.width // 2, blocks, 2).unbind(1)
        low = (first & _LOW_NIBBLES).bitwise_or_((second & _LOW_NIBBLES) << 4)
        high = (first >> 4).bitwise_and_(_LOW_NIBBLES).bitwise_or_(second & ~_LOW_NIBBLES)
        target = out.view(-1, blocks, 2, BLOCK_VALUES // 2, self.width // 2)
        for half, values in enumerate((low, high)):
            target[:, :, half] = values.view(torch.uint8).permute(0, 2, 3, 1)

    def _grouped(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(-1, packed.shape[1] * 2, self.width // 2)

    def unpack(self, layout: KernelLayout, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give quants, uint8 (rows, K/32, 32), and scales, f16 (rows, K/32), of rows start..stop; start % 64 == 0."""
        end = -(-stop // self.width) * self.width
        bytes_ = self._grouped(layout.packed[start:end])
        columns = torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)
        quants = columns.transpose(1, 2).reshape(end - start, -1, BLOCK_VALUES)
        return quants[: stop - start], scales_at(layout.scales, slice(start, stop)).to(torch.float16)

    def dense(
        self, layout: KernelLayout, start: int, stop: int, dtype: torch.dtype, *, native: bool = False
    ) -> torch.Tensor:
        """Give the values of rows start..stop, exact in f32, then rounded to `dtype`: (rows, K); start % 64 == 0."""
        half, end = self.width // 2, -(-stop // self.width) * self.width
        reader = native_reader() if native else None
        if reader is not None and reader.takes(dtype):
            if layout.scales.dtype is torch.bfloat16:
                return reader.dense(layout.packed, layout.scales, range(start, stop, self.width), dtype)
            halves = halves_at(layout.scales, start, end)
            return reader.dense(layout.packed[start:end], halves, range(0, stop - start, self.width), dtype)
        packed = self._grouped(layout.packed[start:end]).transpose(1, 2)
        packed = packed.clone(memory_format=torch.contiguous_format).bitwise_xor_(0x88)
        groups, _, columns = packed.shape
        scales = scales_at(layout.scales, slice(start, end)).view(groups, 2, half, -1)
        values = torch.empty(groups, 2, half, columns, dtype=dtype, device=packed.device)
        scale_raised(packed << 4, scales[:, 0], dtype, out=values[:, 0])
        scale_raised(packed.bitwise_and_(0xF0), scales[:, 1], dtype, out=values[:, 1])
        return values.view(-1, columns)[: stop - start]

    def product_rows(self, native: bool) -> int:
        """Rows of x up to which `matmul` is faster than a product with what `dense` gives. Measured."""
        return 48 if not native or native_reader() is None else 16

    def gather(self, layout: KernelLayout, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give quants, uint8 (T, K/32, 32), and scales, f16 (T, K/32), of the rows at `rows`, i64 (T,)."""
        half = self.width // 2
        inside = rows % self.width
        bytes_ = self._grouped(layout.packed)[rows // self.width, :, inside % half]
        quants = bytes_ >> (inside // half * 4).to(torch.uint8).unsqueeze(-1) & 15
        return quants.unflatten(-1, (-1, BLOCK_VALUES)), scales_at(layout.scales, rows).to(torch.float16)

    def matmul(self, x: torch.Tensor, layout: KernelLayout) -> torch.Tensor:
        """Compute x @ weight.T for x, bf16 (M, K): bf16 (M, Np)."""
        x, packed, scales = x.contiguous(), *layout
        if scales.dtype is torch.bfloat16:
            return torch._weight_int4pack_mm_for_cpu(x, packed, BLOCK_VALUES, scales)
        result = x.new_empty(x.shape[0], packed.shape[0])
        for start, stop, pairs in kernel_pairs(scales, packed.shape[0]):
            part = torch._weight_int4pack_mm_for_cpu(x, packed[start:stop], BLOCK_VALUES, pairs)
            result[:, start:stop] = part
        return result


def _probe(kernel: TorchInt4Kernel) -> str | None:
    """Say what does not hold on this machine, None when all does: the layout, the way back, and a product."""
    if not (hasattr(torch, "_convert_weight_to_int4pack_for_cpu") and hasattr(torch, "_weight_int4pack_mm_for_cpu")):
        return f"torch {torch.__version__} has no int4 CPU kernel"
    generator = torch.Generator("cpu").manual_seed(0)
    rows, columns = 2 * ROW_MULTIPLE, 2 * BLOCK_VALUES
    quants = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.int32, device="cpu")
    spread = torch.rand(rows, columns // BLOCK_VALUES, generator=generator, dtype=torch.float32, device="cpu")
    scales = (spread - 0.5).to(torch.float16)
    blocks = blocks_from_quants(quants.to(torch.uint8), scales)
    ours = kernel.pack(blocks)
    if not torch.equal(ours.packed.view(-1), torch._convert_weight_to_int4pack_for_cpu(quants, 1).view(-1)):
        return f"the kernel's layout on this machine ({torch.backends.cpu.get_cpu_capability()}) is not {kernel.name}"
    back, back_scales = kernel.unpack(ours, 0, rows)
    if not torch.equal(blocks_from_quants(back.flatten(-2), back_scales), blocks):
        return "canonical blocks do not come back from the kernel's layout"
    x = torch.rand(3, columns, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    expected = x.float() @ dequantize_quants(back, back_scales, torch.float32).T
    if not torch.allclose(kernel.matmul(x, ours).float(), expected, rtol=0.05, atol=0.1):
        return "the kernel's product is wrong on a known pattern"
    return None


@lru_cache(maxsize=1)
def _probed() -> tuple[TorchInt4Kernel | None, str]:
    report = "no width was tried"
    for width in (64, 32, 16):
        kernel = TorchInt4Kernel(width)
        try:
            # The first fast product may happen inside FakeTensorMode, where nothing is computed.
            with _disable_current_modes():
                problem = _probe(kernel)
        except RuntimeError as error:
            problem = f"the kernel raised {type(error).__name__}: {error}"
        if problem is None:
            return kernel, f"{kernel.name} ({torch.backends.cpu.get_cpu_capability()})"
        report = problem
    return None, report


def int4_kernel() -> Int4Kernel | None:
    """Give the fast product for Q4_0 on this machine's CPU, None when there is none. Probed once per process."""
    return _probed()[0]


def required_kernel() -> Int4Kernel:
    """Give the kernel that a layout in memory was packed for. Raises UnsupportedOpError when there is none."""
    kernel = int4_kernel()
    if kernel is None:
        raise UnsupportedOpError(
            f"blocks are in a kernel's layout, but this process has no kernel: {int4_kernel_report()}"
        )
    return kernel


def int4_kernel_report() -> str:
    """Name the kernel in use, or say why there is none."""
    return _probed()[1]


def _probe_native(reader: NativeDense, kernel: TorchInt4Kernel) -> str | None:
    """Say what does not hold of the compiled code, None when it gives torch's numbers bit for bit."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows, columns = 3 * ROW_MULTIPLE, 2 * BLOCK_VALUES
    quants = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8, device="cpu")
    spread = torch.rand(rows, columns // BLOCK_VALUES, generator=generator, dtype=torch.float32, device="cpu")
    layout = kernel.pack(blocks_from_quants(quants, (spread - 0.5).to(torch.float16)))
    for dtype in (torch.bfloat16, torch.float32):
        part = range(ROW_MULTIPLE, rows - 7, kernel.width)
        expected = kernel.dense(layout, part.start, part.stop, dtype)
        for scales in (layout.scales, scales_at(layout.scales, slice(0, rows)).T.to(torch.float16).contiguous()):
            found = reader.dense(layout.packed, scales, part, dtype).contiguous()
            if not torch.equal(found.view(torch.int16), expected.view(torch.int16)):
                return f"the compiled code gives other numbers than torch in {dtype}"
    return None


@lru_cache(maxsize=1)
def _native_probed() -> tuple[NativeDense | None, str]:
    kernel = _probed()[0]
    if kernel is None:
        return None, f"there is no int4 kernel: {int4_kernel_report()}"
    with _disable_current_modes():
        reader, report = native_dense()
        problem = report if reader is None else _probe_native(reader, kernel)
    if problem is not None:
        warnings.warn(f'compute="compiled" computes as "fast" does: {problem}', stacklevel=2)
        return None, problem
    return reader, report


def native_reader() -> NativeDense | None:
    """Give the compiled code that makes layouts dense, compiling it at the first call of all; None without a compiler.

    Warns once where there is none.
    """
    return _native_probed()[0]


def native_report() -> str:
    """Say where the compiled code is, or why there is none."""
    return _native_probed()[1]
