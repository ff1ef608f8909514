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
    "quantize_rows",
    "quants_of",
    "scale_raised",
    "scales_of",
]

BLOCK_VALUES: Final = 32
BLOCK_NBYTES: Final = 18
_HALF: Final = BLOCK_VALUES // 2
_HIGH_NIBBLES: Final = 0xF0F0F0F0F0F0F0F0 - (1 << 64)


def blocks_from_quants(quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack `quants`, uint8 (..., K) below 16, and `scales`, f16 (..., K/32), into blocks, uint8 (..., K/32, 18)."""
    shape = scales.shape
    halves = quants.reshape(*shape, 2, _HALF)
    blocks = torch.empty(*shape, BLOCK_NBYTES, dtype=torch.uint8, device=quants.device)
    blocks[..., :2] = scales.contiguous().unsqueeze(-1).view(torch.uint8)
    torch.bitwise_or(halves[..., 0, :], halves[..., 1, :] << 4, out=blocks[..., 2:])
    return blocks


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
    packed = blocks[..., 2:].contiguous().bitwise_xor_(0x88).view(torch.int64)
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
    return values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))


def quantize_rows(rows: torch.Tensor, name: str = "") -> torch.Tensor:
    """Quantize `rows`, any float (..., K), K % 32 == 0: blocks, uint8 (..., K/32, 18).

    The value of largest magnitude sets the scale, `d = max / -8`, so that it falls on the end of the range that has one
    step more; quants are those nearest under the scale as it is stored, f16. Arithmetic is f32. `rows` is not modified.

    Raises QuantizationError, naming `name`, for NaN, infinity, or a value beyond 8 * 65504, which no f16 scale reaches.
    """
    values = rows.to(torch.float32).unflatten(-1, (-1, BLOCK_VALUES))
    largest = _signed_maximum(values)
    scales = (largest / -8).to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise _refusal(values, name)
    stored = scales.float()
    inverse = torch.where(stored == 0, stored, 1.0 / stored)
    quants = (values * inverse).add_(8.5).clamp_(0, 15).to(torch.uint8)
    return blocks_from_quants(quants.flatten(-2), scales.squeeze(-1))


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
