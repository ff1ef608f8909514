"""Where the patches of a picture lie, computed from lengths alone: rows, windows, and taps of an interpolation."""

from dataclasses import dataclass
from typing import Any, final

import torch

from t2n_hf.errors import ConfigError

__all__ = ["PatchPlaces", "cubic_samples"]


@final
@dataclass(frozen=True)
class PatchPlaces:
    """Where the patches of a picture lie: `height` by `width` squares of `merge` by `merge` patches."""

    height: int
    width: int
    merge: int

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.height * self.width * self.merge * self.merge

    def _spread(self, squares: torch.Tensor) -> torch.Tensor:
        """[H or 1, W or 1, M or 1, M or 1] to one number per patch, in the order of patches."""
        return squares.expand(self.height, self.width, self.merge, self.merge).reshape(self.count)

    def rows(self) -> torch.Tensor:
        """The row of each patch, i64."""
        square = (torch.arange(self.height) * self.merge).reshape(-1, 1, 1, 1)
        return self._spread(square + torch.arange(self.merge).reshape(1, 1, -1, 1))

    def columns(self) -> torch.Tensor:
        """The column of each patch, i64."""
        square = (torch.arange(self.width) * self.merge).reshape(1, -1, 1, 1)
        return self._spread(square + torch.arange(self.merge).reshape(1, 1, 1, -1))

    def pairs(self) -> torch.Tensor:
        """Row and column of each patch, [N, 2] i64."""
        return torch.stack([self.rows(), self.columns()], dim=-1)

    def sizes(self) -> torch.Tensor:
        """Moments, height and width in patches, [1, 3] i64, for those who interpolate by them."""
        one = torch.ones(1, dtype=torch.int64)
        return torch.stack([one, self.rows().amax(0, True) + 1, self.columns().amax(0, True) + 1], dim=-1)

    def same_window(self, side: int) -> torch.Tensor:
        """Which patches lie in one window of `side` by `side` squares, [1, 1, N, N]."""
        patches = side * self.merge
        across, down = self.rows() // patches, self.columns() // patches
        same = (across[:, None] == across[None, :]) & (down[:, None] == down[None, :])
        return same[None, None]

    def interpolation(self, side: int, ends: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Four places of a table of `side` by `side` rows for each patch, [N, 4] i64, and their weights.

        `ends` lets the first and the last patch of a row lie on the ends of the table.
        """
        down, down_weights = _taps(self.rows(), side, ends)
        across, across_weights = _taps(self.columns(), side, ends)
        taps = (down[:, :, None] * side + across[:, None, :]).reshape(-1, 4)
        return taps, (down_weights[:, :, None] * across_weights[:, None, :]).reshape(-1, 4)


def _taps(places: torch.Tensor, side: int, ends: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two neighbours in a line of `side` for each of `places` [N] i64, [N, 2] i64, and their weights."""
    last = places.amax().to(torch.float32)
    at = places.to(torch.float32)
    source = at * (side - 1) / last if ends else (at + 0.5) * side / (last + 1) - 0.5
    low = torch.floor(source)
    steps = torch.arange(2)
    weights = (1 - (source[:, None] - low[:, None] - steps).abs()).clamp(min=0)
    return (low.long()[:, None] + steps).clamp(0, side - 1), weights


def cubic_samples(table: torch.Tensor, grid: torch.Tensor, **kind: Any) -> torch.Tensor:  # noqa: ANN401
    """`grid_sample` of a table [1, C, side, side] at points [1, N, 1, 2], by cubes, as [1, C, N, 1].

    tract does it otherwise at the borders, so it is sixteen rows of the table for each point, weighted.
    """
    if (kind.get("mode"), kind.get("padding_mode"), bool(kind.get("align_corners"))) != ("bicubic", "border", False):
        raise ConfigError(f"positions are interpolated by {kind}; known is mode='bicubic', padding_mode='border'")
    side = table.shape[-1]
    (across, across_weights), (down, down_weights) = (_cubic_taps(grid[0, :, 0, axis], side) for axis in (0, 1))
    taps = (down[:, :, None] * side + across[:, None, :]).reshape(-1, 16)
    weights = (down_weights[:, :, None] * across_weights[:, None, :]).reshape(-1, 16, 1)
    rows = table[0].flatten(1).T[taps]
    return (rows * weights).sum(1).T[None, :, :, None]


def _cubic_taps(points: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four neighbours of `points` [N] from -1 to 1 in a line of `side`, [N, 4] i64, and their weights."""
    source = ((points + 1) * side - 1) / 2
    low = torch.floor(source)
    steps = torch.arange(-1, 3)
    far = (source[:, None] - low[:, None] - steps).abs()
    inner = (1.25 * far - 2.25) * far * far + 1
    outer = ((-0.75 * far + 3.75) * far - 6.0) * far + 3.0
    return (low.long()[:, None] + steps).clamp(0, side - 1), torch.where(far <= 1, inner, outer)
