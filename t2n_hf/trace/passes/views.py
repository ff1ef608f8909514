"""Views of views."""

from typing import Final

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult
from t2n_hf.views import RESHAPES, overloads_of

__all__ = ["join_views"]

_aten = torch.ops.aten
_VIEWS: Final = frozenset(overloads_of(RESHAPES))


def join_views(graph: fx.Graph) -> PassResult:
    """Replace a change of shape of a change of shape, that nothing else uses, by one `aten.reshape`.

    Values, order and the other nodes' names are kept. Lengths that are symbols are -1 in the new call; what they are is
    in its `meta["val"]`.
    """
    changed = False
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        before = node.args[0]
        if isinstance(before, fx.Node) and before.target in _VIEWS and len(before.users) == 1:
            node.target, node.kwargs = _aten.reshape.default, {}
            node.args = (before.args[0], [int(n) if isinstance(n, int) else -1 for n in node.meta["val"].shape])
            graph.erase_node(before)
            changed = True
    return PassResult(graph, changed)
