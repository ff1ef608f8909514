"""Positions in time, height and width, of models that count pictures in three directions (Qwen2-VL and later ones)."""

from collections.abc import Sequence

import numpy as np

from t2n_hf.errors import ConfigError

__all__ = ["three_positions"]


def three_positions(tokens: np.ndarray, placeholder: int, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Positions [3, 1, T] i64 of `tokens` [1, T], whose pictures have `grids` of (height, width) features.

    A word has one position, thrice: the next one. The features of a picture share the next one in time, and are counted
    from it by their row in height and by their column in width. What follows a picture goes on behind the largest.

    Raises ConfigError when placeholders and features differ in number, or a picture is interrupted.
    """
    stands = tokens[0] == placeholder
    found = np.empty((3, len(stands)), np.int64)
    at = position = 0
    for height, width in [*grids, (0, 0)]:
        rest = np.flatnonzero(stands[at:])
        first = at + int(rest[0]) if rest.size else len(stands)
        found[:, at:first] = position + np.arange(first - at)
        position += first - at
        at = first + height * width
        if at > len(stands) or not stands[first:at].all() or (height == 0 and rest.size):
            raise ConfigError(
                f"{int(stands.sum())} placeholders (token {placeholder}) for pictures of "
                f"{', '.join(f'{rows} x {columns}' for rows, columns in grids) or 'no'} features, each of which has to "
                "be in one piece; the processor of the model writes them so"
            )
        down, across = np.indices((height, width)).reshape(2, -1)
        found[:, first:at] = position + np.stack([np.zeros_like(down), down, across])
        position += max(height, width)
    return found[:, None]
