"""Q4_0 blocks as pure functions: 32 values along the last axis become 18 bytes.

    bytes 0-1   scale d, f16, little endian
    bytes 2-17  quants: byte i = q[i] | q[i + 16] << 4, q in 0..15
    value       (q - 8) * d

This is the layout of ggml and of tract's `.dat` files.
"""

from typing import Final

import torch

from t2n_hf.errors import QuantizationError

__all__ = [
    "BLOCK_NBYTES",
    "BLOCK_VALUES",
    "blocks_from_quants",
    "dequantize_blocks",
    "dequantize_quants",
    "largest_of_blocks",
    "quantize_rows",
    "quants_of",
    "scale_raised",
    "scales_of",
]

BLOCK_VALUES: Final = 32
BLOCK_NBYTES: Final = 18
_HALF: Final = BLOCK_VALUES // 2
# Values quantized at once by each thread: 2 MiB in f32. Threads gain nothing from many more of them.
_SCRATCH_VALUES: Final = 1 << 19
_MOST_THREADS: Final = 4
_HIGH_NIBBLES: Final = 0xF0F0F0F0F0F0F0F0 - (1 << 64)


def blocks_from_quants(quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack `quants`, uint8 (..., K) below 16, and `scales`, f16 (..., K/32), into blocks, uint8 (..., K/32, 18)."""
    blocks = torch.empty(*scales.shape, BLOCK_NBYTES, dtype=torch.uint8, device=quants.device)
    _pack(quants.clone(memory_format=torch.contiguous_format), scales.contiguous(), blocks)
    return blocks


def _pack(quants: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write blocks of `quants`, contiguous and at a multiple of 8 bytes, and `scales` into `out`."""
    # Eight bytes at a time: loops over the sixteen of half a block would be too short to be fast. No quant reaches
    # into its neighbour when it is multiplied, as it is below 16.
    halves = quants.view(torch.int64).view(*scales.shape, 2, _HALF // 8)
    packed = torch.add(halves[..., 0, :], halves[..., 1, :], alpha=16)
    pairs = out.view(torch.int16)
    pairs[..., 0] = scales.view(torch.int16)
    pairs[..., 1:] = packed.view(torch.int16)


def scales_of(blocks: torch.Tensor) -> torch.Tensor:
    """Give the scales of `blocks` (..., K/32, 18): f16 (..., K/32)."""
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)


def quants_of(blocks: torch.Tensor) -> torch.Tensor:
    """Give the quants of `blocks` (..., K/32, 18): uint8 (..., K/32, 32), each below 16."""
    packed = blocks[..., 2:].contiguous()
    return torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-2)


def dequantize_quants(quants: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `(quants - 8) * scales` in f32, where it is exact, then round to `dtype`.

    `quants` is uint8 (..., K/32, 32) and is overwritten, `scales` f16 (..., K/32); the result is (..., K).
    """
    raised = quants.bitwise_left_shift_(4).bitwise_xor_(0x80)
    return scale_raised(raised.flatten(-2), scales.float(), dtype)


def dequantize_blocks(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the values of `blocks` (..., K/32, 18) in f32, where it is exact, then round to `dtype`: (..., K)."""
    packed = blocks[..., 2:].clone(memory_format=torch.contiguous_format).bitwise_xor_(0x88).view(torch.int64)
    # Eight bytes at a time: loops over the sixteen of half a block would be too short to be fast.
    raised = packed.new_empty(*packed.shape[:-1], 2, packed.shape[-1])
    torch.bitwise_and(packed << 4, _HIGH_NIBBLES, out=raised[..., 0, :])
    torch.bitwise_and(packed, _HIGH_NIBBLES, out=raised[..., 1, :])
    return scale_raised(raised.flatten(-3).view(torch.uint8), scales_of(blocks).float(), dtype)


def scale_raised(
    raised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Give the values (..., K) of quants in raised form, in `dtype`, which is that of `out` (any strides).

    Raised form is a byte whose upper half is the quant with its first bit turned: as a signed number that is
    16 * (q - 8), so that a shift or a mask of a packed byte, and no subtraction, gives the quant. `raised` is uint8 or
    int8 (..., K), contiguous; `scales` f32 (..., K/32).
    """
    values = out if out is not None and dtype is torch.float32 else torch.empty_like(raised, dtype=torch.float32)
    values.copy_(raised.view(torch.int8))
    values.unflatten(-1, (-1, BLOCK_VALUES)).mul_((scales / 16).unsqueeze(-1))
    if out is None:
        return values.to(dtype)
    return out if values is out else out.copy_(values)


def _signed_maximum(values: torch.Tensor) -> torch.Tensor:
    """Give the value of largest magnitude of each block, (..., 32) -> (..., 1), the first one among equals."""
    highest, lowest = values.amax(dim=-1, keepdim=True), values.amin(dim=-1, keepdim=True)
    depth = -lowest
    largest = torch.maximum(highest, depth).copysign_(highest + lowest)
    # Few blocks hold both a value and its negative; to look for the first of them in every block would be slow.
    both = (highest == depth).view(-1).nonzero().squeeze(-1)
    if both.numel():
        undecided = values.reshape(-1, BLOCK_VALUES).index_select(0, both)
        first = undecided.gather(-1, undecided.abs().argmax(dim=-1, keepdim=True))
        largest.view(-1, 1).index_copy_(0, both, first)
    return largest


def largest_of_blocks(values: torch.Tensor, name: str = "") -> torch.Tensor:
    """Give the value of largest magnitude of each block, f32 (..., 32) -> (..., 1), the first one among equals.

    Raises QuantizationError, naming `name`, for NaN, infinity, or a value beyond 8 * 65504, which no f16 scale reaches.
    """
    largest = _signed_maximum(values)
    # As f16 numbers, so many that f32 cannot hold their sum do not fit into memory: it is finite when all of them are.
    if not bool(torch.isfinite((largest / -8).to(torch.float16).float().sum())):
        raise _refusal(values, name)
    return largest


def quantize_rows(rows: torch.Tensor, name: str = "") -> torch.Tensor:
    """Quantize `rows`, any float (..., K), K % 32 == 0: blocks, uint8 (..., K/32, 18).

    The value of largest magnitude sets the scale, `d = max / -8`, so that it falls on the end of the range that has one
    step more; quants are those nearest under the scale as it is stored, f16. Arithmetic is f32. `rows` is not modified.

    Raises QuantizationError, naming `name`, for NaN, infinity, or a value beyond 8 * 65504, which no f16 scale reaches.
    """
    *lead, columns = rows.shape
    flat = rows.reshape(-1, columns)
    blocks = torch.empty(flat.shape[0], columns // BLOCK_VALUES, BLOCK_NBYTES, dtype=torch.uint8, device=rows.device)
    step = max(1, _SCRATCH_VALUES * min(_MOST_THREADS, torch.get_num_threads()) // max(1, columns))
    scratch = torch.empty(min(step, flat.shape[0]), columns, dtype=torch.float32, device=rows.device)
    for start in range(0, flat.shape[0], step):
        part = flat[start : start + step]
        _quantize_values(scratch[: part.shape[0]].copy_(part), blocks[start : start + step], name)
    return blocks.view(*lead, *blocks.shape[1:])


def _quantize_values(values: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """Quantize `values`, f32 (rows, K), which are overwritten, into `out`, uint8 (rows, K/32, 18)."""
    values = values.unflatten(-1, (-1, BLOCK_VALUES))
    scales = (largest_of_blocks(values, name) / -8).to(torch.float16)
    stored = scales.float()
    inverse = (1.0 / stored).masked_fill_(stored == 0, 0.0)
    # A quotient is within -13..13 even where a subnormal scale was rounded, so a signed byte holds it; torch makes
    # those of floats ten times as fast as unsigned ones.
    quants = values.mul_(inverse).add_(8.5).to(torch.int8).clamp_(0, 15).view(torch.uint8)
    _pack(quants.flatten(-2), scales.squeeze(-1), out)


def _refusal(values: torch.Tensor, name: str) -> QuantizationError:
    where = name or "the tensor"
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        return QuantizationError(
            f"{where} has {bad} values that are NaN or infinite and cannot be quantized to Q4_0; "
            "repair the checkpoint, or list its module in modules_to_not_convert"
        )
    return QuantizationError(
        f"{where} has a value of magnitude {float(values.abs().max()):g}; Q4_0 holds at most 8 * 65504, as its "
        "scale is f16; rescale it, or list its module in modules_to_not_convert"
    )
