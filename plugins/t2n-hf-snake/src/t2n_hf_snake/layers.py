"""Layers that torch.export, or an exporter that knows torch's operators only, cannot take as they are."""

import torch
from torch import nn

__all__ = ["Fading", "Snake", "snake"]


@torch.library.custom_op("t2n_hf_snake::snake", mutates_args=())
def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """`x + sin(alpha * x) ** 2 / alpha`, float, `alpha` with one number for each place of the last axis of `x`."""
    return x + torch.sin(alpha * x) ** 2 / alpha


@snake.register_fake
def _(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Snake(nn.Module):
    """The activation of vocoders: a line with a learned period."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.linspace(0.5, 2.0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., width] -> the same shape."""
        return snake(x, self.alpha)


class Fading(nn.Module):
    """An average that forgets: state = fade * state + x, along the second axis, step by step in Python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fade = nn.Parameter(torch.linspace(0.1, 0.9, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [batch, time, width] -> the states, in the same shape."""
        state = torch.zeros_like(x[:, 0])
        states = []
        for time in range(x.shape[1]):
            state = self.fade * state + x[:, time]
            states.append(state)
        return torch.stack(states, dim=1)
