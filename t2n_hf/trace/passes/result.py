"""What a pass gives back."""

from typing import NamedTuple

from torch import fx

__all__ = ["PassResult"]


class PassResult(NamedTuple):
    """The graph (the same object, changed in place) and whether anything was changed."""

    graph: fx.Graph
    changed: bool
