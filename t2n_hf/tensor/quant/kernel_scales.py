"""The scales of one weight in the layout of torch's int4 kernel: as it reads them, or in half of the bytes.

The kernel wants a pair of bf16 for each block, a scale and what is added to the weight: 4 bytes, where Q4_0 has 2. Most
weights hold these pairs (`scales` is bf16). Large tables hold the f16 scales as they are (`scales` is f16), and make
the pairs anew for each product, a slice of rows at a time.
"""

from collections.abc import Iterator
from typing import Final

import torch

from t2n_hf.tensor.quant.packed_rows import ROW_MULTIPLE
from t2n_hf.tensor.quant.q4_0_blocks import BLOCK_VALUES

__all__ = ["halves_at", "kernel_pairs", "put_scales", "scales_at", "scales_form"]

# The scale of a block is f16, the kernel wants bf16: what rounding took away is kept here, in the slot that the kernel
# adds to the weight. It is at most 2^-8 of the scale, so times 2^-40 it is far below what bf16 sums can show.
_RESIDUAL_FACTOR: Final = 2.0**-40
# To make pairs takes a fifth of a product's time, at any size. A table of a vocabulary is multiplied once for a token
# and is much of a model's bytes: there that is 2 to 3 % of the token (measured: SmolLM2 and a Llama of 1.1 B). Matrices
# of layers are most of a model's time, and seldom have more than 8 rows for a column. What is smaller than this saves
# less than half a MiB.
_TABLE_ROWS_PER_COLUMN: Final = 8
_TABLE_SCALES: Final = 1 << 18
# Scales made to pairs at once: with those, and those before rounding, 0.75 MiB, which stay in a core's own cache.
_SLICE_SCALES: Final = 1 << 17


def scales_form(rows: int, columns: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Give shape and dtype of the scales of a weight (N, K); both dtypes take 2 bytes.

    Pairs are bf16 (K/32, Np, 2), where Np is N padded to 64. A large table's are f16 (slices, K/32, rows in a slice),
    so that a slice is read from one piece of memory; the last one is padded to the length of the others.
    """
    groups, tiles = columns // BLOCK_VALUES, -(-rows // ROW_MULTIPLE)
    if rows <= _TABLE_ROWS_PER_COLUMN * columns or rows * groups < _TABLE_SCALES:
        return (groups, tiles * ROW_MULTIPLE, 2), torch.bfloat16
    slices = -(-tiles * ROW_MULTIPLE * groups // _SLICE_SCALES)
    slice_tiles = -(-tiles // slices)
    return (-(-tiles // slice_tiles), groups, slice_tiles * ROW_MULTIPLE), torch.float16


def put_scales(scales: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Write `values`, f16 (rows, K/32), as those of the rows from `start` on."""
    stop = start + len(values)
    if scales.dtype is torch.bfloat16:
        scales[:, start:stop] = _split(values.T.contiguous())
        return
    pieces = _pieces(scales, start, stop)
    for piece, part in zip(pieces, values.split([piece.shape[1] for piece in pieces]), strict=True):
        piece.copy_(part.T)


def scales_at(scales: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Give the scales of some rows, a slice or i64 (T,), exactly, in fresh memory: f32 (T, K/32)."""
    if scales.dtype is torch.bfloat16:
        return _exact(scales[:, rows]).T.contiguous()
    if isinstance(rows, slice):
        return halves_at(scales, rows.start, rows.stop).T.float().contiguous()
    length = scales.shape[-1]
    return scales[rows // length, :, rows % length].float()


def halves_at(scales: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Give those of rows start..stop of f16 scales as f16 (K/32, rows), in fresh memory."""
    return torch.cat(_pieces(scales, start, stop), dim=1)


def _pieces(scales: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Give views of f16 scales, (K/32, rows) of one slice each, of rows start..stop."""
    length, pieces = scales.shape[-1], []
    while start < stop:
        index, inside = divmod(start, length)
        pieces.append(scales[index, :, inside : inside + stop - start])
        start += pieces[-1].shape[1]
    return pieces


def kernel_pairs(scales: torch.Tensor, padded: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Give (start, stop, pairs), slice by slice, of the f16 scales of `padded` rows; pairs are bf16 (K/32, rows, 2).

    The second of a pair is zero, and the first what `_split` makes it. Pairs are overwritten by the next.
    """
    count, groups, length = scales.shape
    # Rounded to bf16 in one pass and widened in another: torch takes ten times as long from f16 to bf16 directly.
    wide, narrow = (scales.new_empty(groups * length, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for index in range(count):
        start, stop = index * length, min((index + 1) * length, padded)
        size = groups * (stop - start)
        floats, rounded = wide[:size], narrow[:size]
        floats.view(groups, -1).copy_(scales[index, :, : stop - start])
        rounded.copy_(floats)
        # As integers, each bf16 becomes itself and, in the upper half, which is the second in memory, a zero.
        floats.view(torch.int32).copy_(rounded.view(torch.uint16))
        yield start, stop, floats.view(torch.bfloat16).view(groups, -1, 2)


def _split(scales: torch.Tensor) -> torch.Tensor:
    """(groups, rows) f16 -> (groups, rows, 2) bf16: the rounded scale, and what rounding took away, made tiny.

    Where it took nothing, what is kept is a zero of the scale's own sign: the sum of both then has the sign of -0.0.
    """
    exact = scales.float()
    rounded = exact.to(torch.bfloat16)
    residual = (exact - rounded.float()) * _RESIDUAL_FACTOR
    residual = torch.where(residual == 0, exact * 0.0, residual)
    return torch.stack((rounded, residual.to(torch.bfloat16)), dim=-1)


def _exact(pairs: torch.Tensor) -> torch.Tensor:
    """Undo `_split` exactly: (groups, rows, 2) bf16 -> (groups, rows) f32."""
    # A bf16 number is the upper half of the f32 of the same value; of a pair, the first is the lower half in memory.
    both = pairs.view(torch.int32).squeeze(-1)
    rounded, residual = (both << 16).view(torch.float32), (both & -65536).view(torch.float32)
    return rounded.add_(residual, alpha=1 / _RESIDUAL_FACTOR)
