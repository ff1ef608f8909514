"""The scale of each Q4_0 block, chosen by how much errors matter in its input channels.

The scale that `quantize_rows` takes spends the whole range on the largest value. Here several are tried, each is
replaced by the one that fits its quants best (weighted least squares), and the one with the smallest weighted error is
kept. The weight of a value v of input channel k, in a row of mean square s, is `(importance[k] + m) * sqrt(s + v^2)`,
where m is the mean importance of all channels: measured on few texts, and blind to what inputs of different channels
have in common, importance is believed by half.
"""

from typing import Final

import torch

from t2n_hf.tensor.quant.q4_0_blocks import BLOCK_NBYTES, BLOCK_VALUES, blocks_from_quants, largest_of_blocks

__all__ = ["TRIED", "quantize_weighted_rows"]

# Quants that the value of largest magnitude is tried at, but for its sign: -8 is the rule without importance. Farther
# out values are clipped, nearer in the range is not used up; either may suit the others better.
TRIED: Final = (8.0, 7.2, 7.6, 8.4, 8.8, 6.8)
# Values that are worked on at once: five buffers of them stay in a core's cache.
_SCRATCH_VALUES: Final = 1 << 16
_LARGEST_SCALE: Final = 65504.0
_TINY: Final = 1e-30


def quantize_weighted_rows(rows: torch.Tensor, importance: torch.Tensor, name: str = "") -> torch.Tensor:
    """Quantize `rows`, any float (N, K), K % 32 == 0: blocks, uint8 (N, K/32, 18).

    `importance` is f32 (K,), finite, 0 or more; only its proportions count. Where nothing that is tried has a smaller
    weighted error, and for all blocks when all of it is 0, a block has the scale of `quantize_rows`. Quants are those
    nearest under the scale as it is stored, f16. The same input gives the same blocks, however many rows are given at
    once. `rows` is not modified.

    Raises QuantizationError, naming `name`, for what `quantize_rows` refuses.
    """
    columns = rows.shape[-1]
    blocks = torch.empty(len(rows), columns // BLOCK_VALUES, BLOCK_NBYTES, dtype=torch.uint8, device=rows.device)
    relative = _relative(importance.to(rows.device))
    step = max(1, _SCRATCH_VALUES // max(1, columns))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(torch.float32)
        blocks[start : start + step] = _quantized(part, relative, name)
    return blocks


def _relative(importance: torch.Tensor) -> torch.Tensor:
    """Give importance and its mean, relative to the largest of the block, (K/32, 32); 0 when all of it is 0."""
    share = importance / importance.amax().clamp_min(torch.finfo(torch.float32).tiny)
    by_block = (share + share.mean()).reshape(-1, BLOCK_VALUES)
    largest = by_block.amax(dim=-1, keepdim=True)
    return torch.where(largest > 0, by_block / largest, 0)


def _quantized(rows: torch.Tensor, importance: torch.Tensor, name: str) -> torch.Tensor:
    """Quantize `rows`, f32 (N, K): uint8 (N, K/32, 18)."""
    values = rows.unflatten(-1, (-1, BLOCK_VALUES))
    largest = largest_of_blocks(values, name)
    safe = torch.where(largest == 0, 1.0, largest)
    # Relative to the largest value of the block, what is tried is the same for all blocks.
    unit = values / safe
    top = rows.abs().amax(dim=-1, keepdim=True).clamp_min(_TINY)
    power = (rows / top).square_().mean(dim=-1).view(-1, 1, 1)
    weights = unit.square().mul_((largest / top.unsqueeze(-1)).square_()).add_(power).sqrt_().mul_(importance)
    scales = _best_scales(unit, weights)
    plain = (largest / -8).to(torch.float16)
    found = (scales * largest).clamp_(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)
    chosen = _nearer(unit, weights, safe, plain, found)
    stored = chosen.float()
    inverse = torch.where(stored == 0, 0.0, safe / stored)
    quants = unit.mul_(inverse).add_(8.5).clamp_(0, 15).to(torch.uint8)
    return blocks_from_quants(quants.flatten(-2), chosen.squeeze(-1))


def _best_scales(unit: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Give the scale of least weighted error, relative to the largest value, among those that fit what is tried."""
    weighted = weights * unit
    best = torch.zeros_like(unit[..., :1])
    scales = torch.full_like(best, -1 / 8)
    quants, product = torch.empty_like(unit), torch.empty_like(unit)
    for tried in TRIED:
        torch.mul(unit, -tried, out=quants).round_().clamp_(-8, 7)
        fit = torch.mul(quants, weighted, out=product).sum(dim=-1, keepdim=True)
        size = torch.mul(quants, quants, out=product).mul_(weights).sum(dim=-1, keepdim=True)
        # The error of the fitted scale, fit / size, is what there was less fit^2 / size.
        gain = torch.where(size > 0, fit.square() / size, 0)
        better = gain > best
        best = torch.where(better, gain, best)
        scales = torch.where(better, fit / size, scales)
    return scales


def _nearer(
    unit: torch.Tensor, weights: torch.Tensor, safe: torch.Tensor, plain: torch.Tensor, found: torch.Tensor
) -> torch.Tensor:
    """Take of two scales, f16, that of the smaller weighted error as it is stored, for each block; `plain` if equal."""
    errors = []
    for scales in (plain, found):
        relative = scales.float() / safe
        inverse = torch.where(relative == 0, 0.0, 1 / relative)
        nearest = torch.mul(unit, inverse).add_(0.5).floor_().clamp_(-8, 7).mul_(relative)
        errors.append(nearest.sub_(unit).square_().mul_(weights).sum(dim=-1, keepdim=True))
    return torch.where(errors[1] < errors[0], found, plain)
