"""Calls that give one of their arguments back."""

from typing import Any, Final

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult
from t2n_hf.views import SAME, overloads_of

__all__ = ["drop_aliases", "drop_idle_dropouts", "drop_whole_copies", "is_idle_dropout"]

_aten = torch.ops.aten

_ALIASES: Final = frozenset({*overloads_of(SAME), _aten.detach_.default})
# With `train` or `training` False, which is their second or third argument.
_DROPOUTS: Final = {
    _aten.dropout.default: 2,
    _aten.dropout_.default: 2,
    _aten.feature_dropout.default: 2,
    _aten.alpha_dropout.default: 2,
}
_CASTS: Final = frozenset(
    {
        _aten.to.device,
        _aten.to.dtype,
        _aten.to.dtype_layout,
        _aten.to.other,
        _aten._to_copy.default,
        _aten.type_as.default,
    }
)
# Nothing moves: these give back a tensor of the same shape.
_SAME_SHAPE: Final = frozenset(
    {_aten.expand.default, _aten.expand_as.default, _aten.view.default, _aten.reshape.default, _aten.slice.Tensor}
)


def drop_aliases(graph: fx.Graph) -> PassResult:
    """Replace copies, casts to the same dtype, expansions and slices of the same shape and dropout by their argument.

    Values, order and the other nodes' names are kept.
    """
    aliases = [node for node in graph.nodes if node.op == "call_function" and _is_alias(node)]
    for node in aliases:
        _replace(node, node.args[0])
    return PassResult(graph, bool(aliases))


def drop_idle_dropouts(graph: fx.Graph) -> PassResult:
    """Replace dropout outside of training by its argument, the very tensor: a write to one is seen in the other.

    Values, order and the other nodes' names are kept. To be run before writes are replaced.
    """
    idle = [node for node in graph.nodes if is_idle_dropout(node)]
    for node in idle:
        _replace(node, node.args[0])
    return PassResult(graph, bool(idle))


def drop_whole_copies(graph: fx.Graph) -> PassResult:
    """Replace `copy(x, y)` by `y` where both are of one shape and dtype: `x.copy_(y)` is that, when nothing writes.

    Values, order and the other nodes' names are kept. To be run when no call writes into a tensor.
    """
    copies = [node for node in graph.nodes if node.target is _aten.copy.default and _are_alike(*node.args[:2])]
    for node in copies:
        _replace(node, node.args[1])
    return PassResult(graph, bool(copies))


def _replace(node: fx.Node, source: Any) -> None:  # noqa: ANN401 - a node
    """Let `source` take a node's place, and what is noted of it: as whose argument or result it is known."""
    for kind, facts in node.meta.get("custom", {}).items():
        mine = source.meta.get("custom", {})
        # New dictionaries: nodes share theirs.
        source.meta["custom"] = {**mine, kind: {**facts, **mine.get(kind, {})}}
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _are_alike(first: Any, second: Any) -> bool:  # noqa: ANN401 - nodes
    one, other = first.meta["val"], second.meta["val"]
    return one.dtype == other.dtype and _shape(one) == _shape(other)


def _is_alias(node: fx.Node) -> bool:
    target: Any = node.target
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source, value = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if target in _ALIASES:
        return True
    if target in _DROPOUTS:
        return is_idle_dropout(node)
    if target in _CASTS:
        return source.dtype == value.dtype
    return target in _SAME_SHAPE and _shape(source) == _shape(value)


def is_idle_dropout(node: fx.Node) -> bool:
    """Whether a call is dropout outside of training, which gives its argument back."""
    return node.target in _DROPOUTS and len(node.args) > 2 and node.args[2] is False


def _shape(value: torch.Tensor) -> list[Any]:
    return [length.node.expr if isinstance(length, torch.SymInt) else length for length in value.shape]
