"""Relative positions that are pooled with the states (Funnel), in a form that can be captured at every length.

Funnel pools the positions of a sequence in Python, as a list of each of them, which fixes the length. After every pool
they are still equally far from each other, the one of <cls> too, so that the first one, the distance and their number
say all of them: while a model is captured these stand for the list, and the number may be a symbol.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from t2n_hf.trace.function_variants import in_scope
from t2n_hf.trace.swap import methods_replaced_by_class
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_pooled_places", "fewest_places"]

_POOLING: Final = "FunnelAttentionStructure"


class _Places(NamedTuple):
    """Positions at equal distances: `first`, `first + distance`, ..., `count` of them."""

    first: int
    distance: int
    count: Any  # a number, or a symbol of one


def capturable_pooled_places(model: nn.Module) -> AbstractContextManager[None]:
    """Let the positions of `model` be pooled without a list of them; after any exit all is as before."""
    return methods_replaced_by_class(model, _methods)


def fewest_places(model: nn.Module) -> int:
    """Length from which each block of `model` pools, to more than one place. 1 for other models.

    With a <cls> a pair is not pooled; without one it is, to a single place, which torch takes for a fixed length.
    """
    pooling = next((module for module in modules_of(model) if type(module).__name__ == _POOLING), None)
    if pooling is None:
        return 1
    config: Any = pooling.config
    fewest = 3
    for _ in config.block_sizes[2:]:
        fewest = 2 * fewest - (2 if config.separate_cls and not config.truncate_seq else 1)
    return fewest


@cache
def _methods(kind: Any) -> Mapping[str, Callable[..., Any]]:  # noqa: ANN401 - a class of transformers
    if kind.__name__ == "FunnelRelMultiheadAttention":
        attention = in_scope(kind.relative_positional_attention, {"_relative_shift_gather": _shifted})
        return {"relative_positional_attention": attention}
    if kind.__name__ == "FunnelDecoder":
        spread = inspect.unwrap(kind.forward).__globals__["upsample"]
        return {"forward": in_scope(kind.forward, {"upsample": partial(_spread, spread)})}
    if kind.__name__ != _POOLING:
        return {}
    return {
        "get_position_embeds": in_scope(kind.get_position_embeds, {"list": lambda places: places, "range": _counted}),
        "stride_pool_pos": _pooled,
        "relative_pos": _relative,
    }


def _counted(*bounds: Any) -> Any:  # noqa: ANN401 - as `range`; the one over all positions has one bound, over blocks two
    return _Places(0, 1, bounds[0]) if len(bounds) == 1 else range(*bounds)


def _pooled(self: Any, pos_id: _Places, block_index: int) -> _Places:  # noqa: ANN401 - a class of transformers
    """Every second of the positions; with a <cls> of its own every second of those after it, and one before them."""
    first, distance, count = pos_id
    if not self.config.separate_cls:
        return _Places(first, 2 * distance, (count + 1) // 2)
    return _Places(1 - 2**block_index, 2 * distance, 1 + (count - 1 if self.config.truncate_seq else count) // 2)


def _relative(
    _self: nn.Module,
    pos: _Places,
    stride: int,
    pooled_pos: _Places | None = None,
    shift: int = 1,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Distances between the positions and the pooled ones, the largest first, [T] i64."""
    pooled = pooled_pos or pos
    begin = pooled.first - pos.first
    steps = torch.arange(shift * pooled.count + pos.count, device=device)
    largest: torch.Tensor = begin + stride * (shift * pooled.count)
    return largest - stride * steps


def _spread(
    spread: Callable[..., torch.Tensor],
    states: torch.Tensor,
    stride: int,
    target_len: Any,  # noqa: ANN401 - a number, or a symbol of one
    separate_cls: bool = True,
    truncate_seq: bool = False,
) -> torch.Tensor:
    """Of states [B, T, D] each one `stride` times, `target_len` of them, as `spread` of transformers does it.

    Without a <cls> that one cuts some off, or none, between which torch makes a difference.
    """
    if separate_cls:
        return spread(states, stride, target_len, separate_cls, truncate_seq)
    return states[:, torch.arange(target_len, device=states.device) // stride]


def _shifted(scores: torch.Tensor, context_len: int, shift: int) -> torch.Tensor:
    """Of scores by distance [B, H, S, T] those of each pair of states, [B, H, S, context_len].

    Funnel reads the numbers in rows of other lengths, which a graph of a free length does not.
    """
    batch, heads, length, _ = scores.shape
    distances = shift * (length - torch.arange(length, device=scores.device))
    columns = distances[:, None] + torch.arange(context_len, device=scores.device)
    return scores.gather(3, columns.expand(batch, heads, length, context_len))
