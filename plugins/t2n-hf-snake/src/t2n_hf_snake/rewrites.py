"""What stands for `Fading.forward` while a model is captured."""

import torch

from t2n_hf_snake.layers import Fading

__all__ = ["fading"]


def fading(module: Fading, x: torch.Tensor) -> torch.Tensor:
    """The same states as a sum, each with its power of `fade`: a loop would fix the number of steps in the archive."""
    time = torch.arange(x.shape[1])
    passed = time[:, None] - time[None, :]
    faded = module.fade[:, None, None] ** passed.clamp(min=0)  # [width, time, time]
    weights = torch.where(passed >= 0, faded, 0.0)
    return (weights @ x.permute(0, 2, 1)[..., None]).squeeze(-1).permute(0, 2, 1)
