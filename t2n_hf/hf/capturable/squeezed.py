"""Encoders that work on sums of neighbouring frames and spread the results again (SEW), for any number of frames.

Their code adds zeros at the end only where frames are left over, which a free length does not say. To add none where
none are is the same.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_squeezes"]

_SQUEEZED: Final = ("SEWEncoder", "SEWDEncoder")


@contextmanager
def capturable_squeezes(model: nn.Module) -> Iterator[None]:
    """Let what `model` spreads have as many frames as it had, without asking; after any exit all is as before."""
    with ExitStack() as stack:
        for module in modules_of(model):
            if type(module).__name__ in _SQUEEZED:
                frames: list[Any] = []
                parts: tuple[tuple[Any, Any], ...] = ((module.pool, _squeezed), (module.upsample, _spread))
                for part, method in parts:
                    stack.enter_context(methods_replaced(part, {"forward": partial(method, frames=frames)}))
        yield


def _squeezed(self: Any, states: torch.Tensor, *, frames: list[Any]) -> torch.Tensor:  # noqa: ANN401 - a part of the encoder
    """States [B, width, T]; T is noted for `_spread`."""
    frames[:] = [states.shape[-1]]
    pooled: torch.Tensor = type(self).forward(self, states)
    return pooled


def _spread(self: Any, states: torch.Tensor, *, frames: list[Any]) -> torch.Tensor:  # noqa: ANN401 - a part of the encoder
    """States [B, T', width] become [B, T, width]; the last are zeros."""
    spread: torch.Tensor = type(self).forward(self, states)
    return F.pad(spread, (0, 0, 0, frames[0] - spread.shape[1]))
