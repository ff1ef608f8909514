"""Root mean square normalisation, written out by models in five calls."""

from typing import Any

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["fuse_rms_norm"]

_aten = torch.ops.aten


def fuse_rms_norm(graph: fx.Graph) -> PassResult:
    """Replace `x * rsqrt(mean(x ** 2, -1) + eps)` by `aten.rms_norm(x)`, without a weight.

    Values are kept; so are the parts that something else uses, and the name of the product.
    """
    changed = False
    for node in list(graph.nodes):
        match = _match(node) if node.target is _aten.mul.Tensor else None
        if match is not None:
            x, eps = match
            node.target = _aten.rms_norm.default
            node.args = (x, [x.meta["val"].shape[-1]], None, eps)
            changed = True
    return PassResult(graph, changed)


def _match(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The normalised tensor and eps of a product of the two, in either order."""
    for x, factor in (node.args, node.args[::-1]):
        if isinstance(x, fx.Node) and isinstance(factor, fx.Node) and factor.target is _aten.rsqrt.default:
            eps = _eps_of(factor.args[0], x)
            if eps is not None and isinstance(x.meta["val"].shape[-1], int):
                return x, eps
    return None


def _eps_of(total: Any, x: fx.Node) -> float | None:  # noqa: ANN401 - an argument of a node
    """Take eps out of `mean(x ** 2, -1, keepdim) + eps`."""
    if not isinstance(total, fx.Node) or total.target is not _aten.add.Tensor or total.kwargs:
        return None
    mean, eps = total.args
    if not isinstance(eps, float) or not isinstance(mean, fx.Node) or mean.target is not _aten.mean.dim or mean.kwargs:
        return None
    square, axes, *keepdim = mean.args
    last = axes in ([-1], [x.meta["val"].ndim - 1])
    return eps if last and keepdim == [True] and _is_square(square, x) else None


def _is_square(node: Any, x: fx.Node) -> bool:  # noqa: ANN401 - an argument of a node
    if not isinstance(node, fx.Node):
        return False
    if node.target is _aten.mul.Tensor:
        return node.args == (x, x)
    squares = {_aten.square.default: (x,), _aten.pow.Tensor_Scalar: (x, 2)}
    return bool(tuple(node.args) == squares.get(node.target))  # type: ignore[call-overload]
