"""Axes of length 1 repeated to a free length, in a form that tract keeps.

tract leaves a broadcast out when a product follows, as products broadcast by themselves. When nothing else in the
product has the length, the length is lost, and a later concatenation or reshape fails or is wrong. Rows that are
gathered stay.
"""

from typing import Any, Final

import torch
from torch import fx

from t2n_hf.ops.dims import Length, Shape
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.value import Number, Value
from t2n_hf.views import EXPANSIONS, RESHAPES, SAME, TURNS, overloads_of

__all__ = ["filled", "repeated"]

_aten = torch.ops.aten
_PRODUCTS: Final[frozenset[Any]] = frozenset(
    {
        *(_aten.linear.default, _aten.matmul.default, _aten.bmm.default, _aten.mm.default, _aten.addmm.default),
        *(_aten.baddbmm.default, _aten.einsum.default, _aten.conv1d.default, _aten.conv2d.default),
        _aten.scaled_dot_product_attention.default,
    }
)
# Layers, and whatever else the capture keeps whole.
_OWN: Final = "t2n_hf"
# What stands between: the same values, or each by itself.
_BETWEEN: Final[frozenset[Any]] = frozenset(
    {
        *overloads_of((*SAME, *RESHAPES, *TURNS, *EXPANSIONS)),
        *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.dropout.default, _aten.layer_norm.default),
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor),
    }
)


def repeated(emit: Emit, x: Value, shape: Shape) -> Value:
    """`x`, of the rank of `shape`, with its axes of length 1 that become a free length gathered, where that matters.

    Fixed lengths are lost as well where what is repeated is joined with something else, and a product sums over both.
    """
    joined = _is_joined_in_product(emit.node)
    grown = [axis for axis in range(x.rank) if x.shape[axis] == 1 and shape[axis] != 1]
    axes = [axis for axis in grown if joined or not isinstance(shape[axis], int)]
    if not axes or not (joined or _feeds_product(emit.node)):
        return x
    for axis in axes:
        x = emit.gather(x, _zeros(emit, shape[axis]), axis)
    return x


def filled(emit: Emit, number: Number) -> Value:
    """One number everywhere, in the shape and dtype of the node's result."""
    start = tuple(length if isinstance(length, int) else 1 for length in emit.shape)
    if start == emit.shape or not _feeds_product(emit.node):
        return emit.full(emit.shape, number, emit.dtype)
    return repeated(emit, emit.full(start, number, emit.dtype), emit.shape)


def _zeros(emit: Emit, count: Length) -> Value:
    places = emit.range(0, count, torch.int64)
    return emit.binary("min", places, 0, torch.int64)


def _feeds_product(node: fx.Node) -> bool:
    """Whether a product takes the values of a node as an operand; a call of the capture's own may hold one."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if _is_product(user):
                return True
            if user.target in _BETWEEN and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _is_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS or getattr(node.target, "namespace", "") == _OWN


def _is_joined_in_product(node: fx.Node) -> bool:
    """Whether a product takes the values of a node, joined with others along the axis that it sums over."""
    for user in node.users:
        rank = len(user.meta["val"].shape) if user.target is _aten.cat.default else 0
        axis = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
        if rank and axis in (-1, rank - 1) and any(map(_is_product, user.users)):
            return True
    return False
