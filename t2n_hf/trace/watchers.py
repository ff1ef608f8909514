"""Forward hooks that only look at a layer from outside: they belong to the model's graph, not to the layer's."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["hooks_left_out", "watched_from_outside"]


def watched_from_outside(layer: nn.Module) -> bool:
    """Whether the layer has forward hooks that may run elsewhere, on its arguments and its result.

    A model of transformers collects hidden states by them. Hooks that begin something before the layer runs and end it
    afterwards come in pairs, and stay with the layer.
    """
    return bool(layer._forward_hooks) and not layer._forward_pre_hooks


@contextmanager
def hooks_left_out(layer: nn.Module) -> Iterator[None]:
    """Let the layer run without its own forward hooks; they are back after any exit."""
    hooks = layer._forward_hooks
    layer._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        layer._forward_hooks = hooks
