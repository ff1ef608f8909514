"""Rotary position embedding by halves, written out by models in seven calls."""

from typing import Any, Final

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["ROPE_OP", "fuse_rope"]

_aten = torch.ops.aten
_END: Final = 2**63 - 1


@torch.library.custom_op("t2n_hf::rope", mutates_args=())
def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [..., D]: x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, `cos` and `sin` broadcast."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@_rope.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos


ROPE_OP: Final = torch.ops.t2n_hf.rope.default


def fuse_rope(graph: fx.Graph) -> PassResult:
    """Replace `x * cos + rotate_half(x) * sin` by `t2n_hf::rope(x, cos, sin)`.

    Values are kept; so are the parts that something else uses, and the name of the sum.
    """
    changed = False
    for node in list(graph.nodes):
        match = _match(node) if node.target is _aten.add.Tensor and not node.kwargs else None
        if match is not None:
            node.target, node.args = ROPE_OP, match
            changed = True
    return PassResult(graph, changed)


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    left, right = node.args
    if not (_is_call(left, _aten.mul.Tensor) and _is_call(right, _aten.mul.Tensor)):
        return None
    (x, cos), (turned, sin) = left.args, right.args  # type: ignore[union-attr]
    nodes = [x, cos, sin]
    if not all(isinstance(n, fx.Node) for n in nodes) or not _is_half_turn(turned, x):
        return None
    value = x.meta["val"]  # type: ignore[union-attr]
    same = all(n.meta["val"].dtype == value.dtype and n.meta["val"].ndim == value.ndim for n in nodes)  # type: ignore[union-attr]
    return (x, cos, sin) if same else None  # type: ignore[return-value]


def _is_half_turn(node: Any, x: Any) -> bool:  # noqa: ANN401 - arguments of nodes
    """Whether `node` is cat(-x[..., half:], x[..., :half])."""
    if not _is_call(node, _aten.cat.default) or len(node.args) != 2 or len(node.args[0]) != 2:
        return False
    negative, first = node.args[0]
    value = x.meta["val"]
    last = value.ndim - 1
    if node.args[1] not in (-1, last) or not _is_call(negative, _aten.neg.default) or value.shape[-1] % 2:
        return False
    half = value.shape[-1] // 2
    return _bounds(first, x, last) == (0, half) and _bounds(negative.args[0], x, last) in (
        (half, _END),
        (half, 2 * half),
    )


def _bounds(node: Any, x: Any, axis: int) -> tuple[Any, Any] | None:  # noqa: ANN401 - arguments of nodes
    """Begin and end of a slice of `x` along its last axis."""
    if not _is_call(node, _aten.slice.Tensor) or node.args[0] is not x or len(node.args) != 4:
        return None
    return (node.args[2] or 0, node.args[3]) if node.args[1] in (-1, axis) else None


def _is_call(node: Any, target: Any) -> bool:  # noqa: ANN401 - an argument of a node
    return isinstance(node, fx.Node) and node.target is target
