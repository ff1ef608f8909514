"""Ternary: each value is -1, 0 or 1 times a scale for 32 neighbours. 2.5 bits per value.

For use in PyTorch: tract has no such format, and an export holds the dense values.

Scale and signs of a block are those that minimise the (weighted) squared error, found exactly. Whatever the scale s,
the best signs are those of the values beyond s / 2: so they are those of the k largest magnitudes, for some k, and of
these the best scale is the mean. All k are tried. (Ternary Weight Networks, arXiv:1605.04711, sets the same problem for
a whole matrix and solves it approximately, at 0.7 times the mean magnitude. The mean magnitude itself as the scale, as
in BitNet b1.58, arXiv:2402.17764, is for models that are trained with it.) Values that are ternary already, with an f16
scale for each block, are kept as they are.
"""

from typing import ClassVar, final

import torch

from t2n_hf.tensor.quant.packed_blocks import PackedBlocks

__all__ = ["TernaryTensor"]


def _best_scales(magnitudes: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Give the scale of each block, f32 (..., 1), that leaves the least squared error of `magnitudes`, f32 (..., 32).

    With the k largest at scale s, the error is sum(w x^2) - 2 s sum_k(w x) + s^2 sum_k(w): least at the weighted mean
    of the k, where it has fallen by sum_k(w x)^2 / sum_k(w).
    """
    ordered, order = magnitudes.sort(dim=-1, descending=True)
    if importance is None:
        weights = torch.ones_like(ordered)
    else:
        total = importance.sum(dim=-1, keepdim=True)
        weights = torch.where(total > 0, importance, 1.0).expand_as(ordered).gather(-1, order)
    sums, counts = (weights * ordered).cumsum(dim=-1), weights.cumsum(dim=-1)
    means = torch.where(counts > 0, sums / counts, 0.0)
    return means.gather(-1, (sums * means).argmax(dim=-1, keepdim=True))


@final
class TernaryTensor(PackedBlocks):
    """A weight (..., N, K), K % 32 == 0, of which each value is -1, 0 or 1 times the scale of its block.

    A block has 10 bytes: the scale, f16, not negative; then 8 bytes, byte i = q[i] | q[i + 8] << 2 | q[i + 16] << 4 |
    q[i + 24] << 6, where q is the sign + 1.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.ternary.v1"
    PART: ClassVar[str] = "ternary"
    LABEL: ClassVar[str] = "ternary"
    BLOCK_VALUES: ClassVar[int] = 32
    BLOCK_NBYTES: ClassVar[int] = 10

    @classmethod
    def _blocks_of(cls, values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        scales = _best_scales(values.abs(), importance).to(torch.float16)
        # The signs that are nearest under the scale as it is stored; under a scale of 0 there are none.
        half = scales.float() / 2
        codes = (values > half).to(torch.uint8) + 1 - ((values < -half) & (half > 0)).to(torch.uint8)
        codes = torch.where(half > 0, codes, 1)
        quarters = codes.unflatten(-1, (4, 8))
        blocks = torch.empty(*values.shape[:-1], cls.BLOCK_NBYTES, dtype=torch.uint8, device=values.device)
        blocks[..., :2] = scales.view(torch.uint8)
        blocks[..., 2:] = quarters[..., 0, :] | quarters[..., 1, :] << 2
        blocks[..., 2:] |= quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6
        return blocks

    @classmethod
    def _values_of(cls, blocks: torch.Tensor) -> torch.Tensor:
        packed = blocks[..., 2:].contiguous()
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-2)
        scales = blocks[..., :2].contiguous().view(torch.float16).float()
        return codes.view(torch.int8).sub_(1).float().mul_(scales)

    @property
    def ternary(self) -> torch.Tensor:
        """The blocks, uint8 (..., N, K/32, 10)."""
        return self._blocks
