"""Masks of models in which some tokens see others behind them, made of comparisons of positions.

transformers makes them by looking up, for each pair of positions, the blocks they belong to: tables that tract takes
minutes to load. `tests/hf` holds these to its own.
"""

import torch
from torch.nn import functional

__all__ = ["image_masks", "prefix_masks"]


def image_masks(marks: torch.Tensor, past: int, window: int | None, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks [1, 1, S, P+S] of a model in which the tokens of one image see each other, by kind of layer.

    `marks` [1, S] i64 is 1 where one of the S new tokens stands for an image; neighbours are of the same image. Those
    of the past are in no image. A window holds for images too. `like` has the type of the masks: 0 or its least number.
    """
    stands = marks[0] == 1
    begins = stands & ~functional.pad(stands, (1, 0))[:-1]
    image = torch.where(stands, torch.cumsum(begins.to(torch.int64), dim=0), 0)
    of_all = torch.cat([image.new_zeros(past), image])
    same = (image[:, None] == of_all[None, :]) & (image[:, None] > 0)
    later, far = _compared(marks.shape[1], past, window)
    seen = {"full_attention": ~later | same}
    if far is not None:
        seen["sliding_attention"] = seen["full_attention"] & ~far
    return {kind: _added(mask, like) for kind, mask in seen.items()}


def prefix_masks(new: int, past: int, window: int | None, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks [1, 1, S, P+S] of a model whose prompt sees all of itself, by kind of layer.

    The prompt is what is computed without a past, and each of its tokens sees it all, in windows too. Later tokens see
    what is before them.
    """
    later, far = _compared(new, past, window)
    # The first position tells whether there is a past, at any length.
    prompt = ((torch.arange(new) + past)[:1] == 0)[None, :]
    seen = {"full_attention": ~later | prompt}
    if far is not None:
        seen["sliding_attention"] = (~later & ~far) | prompt
    return {kind: _added(mask, like) for kind, mask in seen.items()}


def _compared(new: int, past: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which of all positions are later than each of the new ones, and which lie before its window, [S, P+S]."""
    queries, keys = (torch.arange(new) + past)[:, None], torch.arange(past + new)[None, :]
    return keys > queries, None if window is None else ~(keys > queries - window)


def _added(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(like.dtype).min
    return torch.where(seen, 0.0, least).to(like.dtype)[None, None]
