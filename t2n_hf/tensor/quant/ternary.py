"""Ternary: each value is -1, 0 or 1 times a scale for 32 neighbours. 2.5 bits per value.

For use in PyTorch: tract has no such format, and an export holds the dense values.

Scale and signs of a block are those that minimise the (weighted) squared error, found exactly. Whatever the scale s,
the best signs are those of the values beyond s / 2: so they are those of the k largest magnitudes, for some k, and of
these the best scale is the mean. All k are tried. (Ternary Weight Networks, arXiv:1605.04711, sets the same problem for
a whole matrix and solves it approximately, at 0.7 times the mean magnitude. The mean magnitude itself as the scale, as
in BitNet b1.58, arXiv:2402.17764, is for models that are trained with it.) Values that are ternary already, with an f16
scale for each block, are kept as they are.
"""

from typing import ClassVar, Final, final

import torch

from t2n_hf.tensor.quant.packed_blocks import PackedBlocks

__all__ = ["TernaryTensor"]

_VALUES: Final = 32
_TOP_BITS: Final = 0xC0C0C0C0C0C0C0C0 - (1 << 64)
_ONES: Final = 0x4040404040404040


def _sorted_descending(columns: torch.Tensor) -> torch.Tensor:
    """Sort each of M columns of (32, M), which is overwritten: a bitonic network, over rows that are long.

    (`torch.sort` of many short rows takes ten times as long.)
    """
    source, target = columns, torch.empty_like(columns)
    size = 2
    while size <= _VALUES:
        step = size // 2
        while step:
            # Pairs that are `step` apart. Every other run of `size` is sorted the other way, until one is left.
            shape = (max(1, _VALUES // (2 * size)), min(2, _VALUES // size), size // (2 * step), 2, step, -1)
            before, after = source.view(shape), target.view(shape)
            for way in range(shape[1]):
                first, second = before[:, way, :, 0], before[:, way, :, 1]
                torch.maximum(first, second, out=after[:, way, :, way])
                torch.minimum(first, second, out=after[:, way, :, 1 - way])
            source, target = target, source
            step //= 2
        size *= 2
    return source


def _best_scales(magnitudes: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Give the scale of each block, f32 (..., 1), that leaves the least squared error of `magnitudes`, f32 (..., 32).

    With the k largest at scale s, the error is sum(w x^2) - 2 s sum_k(w x) + s^2 sum_k(w): least at the weighted mean
    of the k, where it has fallen by sum_k(w x)^2 / sum_k(w).
    """
    if importance is None:
        ordered = _sorted_descending(magnitudes.flatten(0, -2).t().contiguous())
        best, total = ordered[0].clone(), ordered[0].clone()
        most = best.square()
        for count, row in enumerate(ordered[1:], start=2):
            mean = total.add_(row) / count
            fall = total * mean
            best = torch.where(fall > most, mean, best)
            most = torch.maximum(fall, most)
        return best.view(*magnitudes.shape[:-1], 1)
    total = importance.sum(dim=-1, keepdim=True)
    ordered, order = magnitudes.sort(dim=-1, descending=True)
    weights = torch.where(total > 0, importance, 1.0).expand_as(ordered).gather(-1, order)
    sums, counts = (weights * ordered).cumsum(dim=-1), weights.cumsum(dim=-1)
    means = torch.where(counts > 0, sums / counts, 0.0)
    return means.gather(-1, (sums * means).argmax(dim=-1, keepdim=True))


@final
class TernaryTensor(PackedBlocks):
    """A weight (..., N, K), K % 32 == 0, of which each value is -1, 0 or 1 times the scale of its block.

    A block has 10 bytes: the scale, f16, not negative; then 8 bytes, byte i = q[i] | q[i + 8] << 2 | q[i + 16] << 4 |
    q[i + 24] << 6, where q is 1 - the sign.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.ternary.v1"
    PART: ClassVar[str] = "ternary"
    LABEL: ClassVar[str] = "ternary"
    BLOCK_VALUES: ClassVar[int] = _VALUES
    BLOCK_NBYTES: ClassVar[int] = 10

    @classmethod
    def _blocks_of(cls, values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        scales = _best_scales(values.abs(), importance).to(torch.float16)
        # The signs that are nearest under the scale as it is stored; under a scale of 0 there are none.
        stored = scales.float()
        inverse = torch.where(stored == 0, stored, 1.0 / stored)
        codes = (values * -inverse).round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        # Eight bytes at a time: loops over eight values would be too short to be fast. No code reaches into the next.
        quarters = codes.view(*values.shape[:-1], 4, 8).view(torch.int64)
        packed = quarters[..., 0, :] | quarters[..., 1, :] << 2 | quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6
        blocks = torch.empty(*values.shape[:-1], cls.BLOCK_NBYTES, dtype=torch.uint8, device=values.device)
        blocks[..., :2] = scales.view(torch.uint8)
        blocks[..., 2:] = packed.view(torch.uint8)
        return blocks

    @classmethod
    def _values_of(cls, blocks: torch.Tensor) -> torch.Tensor:
        packed = blocks[..., 2:].clone(memory_format=torch.contiguous_format).view(torch.int64)
        # Each code moves to the top of its byte, which then is, as a signed one, 64 times the sign.
        raised = packed.new_empty(*packed.shape[:-1], 4)
        for quarter in range(4):
            torch.bitwise_and(packed[..., 0] << (6 - 2 * quarter), _TOP_BITS, out=raised[..., quarter])
        raised ^= _ONES
        scales = blocks[..., :2].contiguous().view(torch.float16).float()
        return raised.view(torch.int8).float().mul_(scales.mul_(1 / 64))

    @property
    def ternary(self) -> torch.Tensor:
        """The blocks, uint8 (..., N, K/32, 10)."""
        return self._blocks
