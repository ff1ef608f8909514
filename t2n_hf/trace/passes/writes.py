"""Writes into parts of tensors, as calls that give the whole tensor anew."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx

from t2n_hf.errors import CaptureError
from t2n_hf.trace.passes.result import PassResult

__all__ = ["refuse_kept_writes", "replace_writes"]

_aten = torch.ops.aten


def replace_writes(graph: fx.Graph) -> PassResult:
    """Replace writes (`x.add_(y)`, `x[:, 1:] = y`, `x[0].fill_(1)`) by calls that give the whole tensor anew.

    Values are kept: whatever used the tensor after the write uses the new one.

    Raises:
        CaptureError: a write through a view that repeats elements or may be a copy; one that a view which is used
            afterwards would see; one by an operator that has no form without the write.
    """
    anew: set[fx.Node] = set()  # tensors of their own, although the calls that make them are views by their form
    for node in list(graph.nodes):
        if _writes(node) and isinstance(node.args[0], fx.Node):
            anew.add(_replace(graph, node, _views_to(node.args[0], anew)))
    return PassResult(graph, bool(anew))


def refuse_kept_writes(graph: fx.Graph, kept: Mapping[fx.Node, str]) -> None:
    """Raise CaptureError when the graph writes into one of `kept`: the tensors that a module holds, by name.

    The next call of the module would see what was written; an archive's tensors stay as they are.
    """
    for node in graph.nodes:
        if not _writes(node):
            continue
        root: Any = node.args[0]
        while isinstance(root, fx.Node) and _is_view(root):
            root = root.args[0]
        if root in kept:
            raise CaptureError(
                f"{node.target} changes {kept[root]!r}, which the module keeps from call to call; an archive cannot. "
                "Make it an input and an output"
            )


def _alias(node: fx.Node) -> Any:  # noqa: ANN401 - torch's alias info, or None
    schema = getattr(node.target, "_schema", None)
    return schema.arguments[0].alias_info if schema is not None and schema.arguments else None


# They change what the tensor object says of itself, not the elements: emitters give their result anew.
_NO_ELEMENTS: Final = frozenset(
    {
        _aten.detach_.default,
        _aten.squeeze_.default,
        _aten.squeeze_.dim,
        _aten.t_.default,
        _aten.transpose_.default,
        _aten.unsqueeze_.default,
    }
)


# These are views, or copies, as it happens.
_PERHAPS_COPIES: Final = frozenset(
    {
        _aten.contiguous.default,
        _aten.flatten.using_ints,
        _aten.reshape.default,
        _aten.to.device,
        _aten.to.dtype,
        _aten.to.dtype_layout,
    }
)


def _writes(node: fx.Node) -> bool:
    alias = _alias(node)
    if node.op != "call_function" or alias is None or not alias.is_write or node.target in _NO_ELEMENTS:
        return False
    return not (node.target is _aten.dropout_.default and node.args[2] is False)


def _is_view(node: fx.Node) -> bool:
    alias = _alias(node)
    return node.op == "call_function" and alias is not None and not alias.is_write


def _views_to(node: fx.Node, anew: set[fx.Node]) -> list[fx.Node]:
    """The views that lead from a tensor of its own to this one, first view first."""
    chain: list[fx.Node] = []
    while _is_view(node) and node not in anew and node.target not in _PERHAPS_COPIES:
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _replace(graph: fx.Graph, node: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """Replace one write; gives the whole tensor as it is afterwards."""
    root: Any = chain[0].args[0] if chain else node.args[0]
    later = set(_after(node))
    _refuse_other_views(root, chain, later, node)
    with graph.inserting_after(node):
        value = _pure(graph, node)
    last = value
    for view in reversed(chain):
        with graph.inserting_after(last):
            last = _put_back(graph, view, last, node)
    _use_afterwards(root, last, later)
    if chain:
        _use_afterwards(chain[-1], value, later)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return last


def _pure(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The call without its write."""
    value = graph.call_function(_without_write(node.target), node.args, node.kwargs)
    value.meta = dict(node.meta)
    return value


def _without_write(target: Any) -> Any:  # noqa: ANN401 - an OpOverload
    """`aten.add_.Tensor` -> `aten.add.Tensor`."""
    packet = getattr(_aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    pure = getattr(packet, target._overloadname, None) if target._schema.name.endswith("_") else None
    if pure is None:
        raise CaptureError(f"{target} writes into a tensor, and torch has no operator that does the same without")
    return pure


# Exchanged twice, axes are as they were; an alias has the same axes.
_TURNS: Final = frozenset({_aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default})
# The same elements in the same order; never a copy, as reshape and flatten may be.
_SHAPES: Final = frozenset({_aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims})
_PARTS: Final = {_aten.slice.Tensor: _aten.slice_scatter.default, _aten.select.int: _aten.select_scatter.default}


def _put_back(graph: fx.Graph, view: fx.Node, value: fx.Node, write: fx.Node) -> fx.Node:
    """The tensor that was viewed, with what is under the view replaced."""
    source: Any = view.args[0]
    if view.target in _PARTS:
        whole = graph.call_function(_PARTS[view.target], (source, value, *view.args[1:]))
    elif view.target in _TURNS:
        whole = graph.call_function(view.target, (value, *view.args[1:]))
    elif view.target is _aten.permute.default:
        axes: Any = view.args[1]
        order = [axis % len(axes) for axis in axes]
        back = sorted(range(len(order)), key=order.__getitem__)
        whole = graph.call_function(_aten.permute.default, (value, back))
    elif view.target in _SHAPES:
        lengths = [n if isinstance(n, int) else -1 for n in source.meta["val"].shape]
        whole = graph.call_function(_aten.reshape.default, (value, lengths))
    else:
        raise CaptureError(f"{write.target} writes through {view.target}, which cannot be undone; write into slices")
    whole.meta = {**write.meta, "val": source.meta["val"]}
    return whole


def _after(node: fx.Node) -> list[fx.Node]:
    found = []
    while node.next.op != "root":
        node = node.next
        found.append(node)
    return found


def _refuse_other_views(root: Any, chain: list[fx.Node], later: set[fx.Node], write: fx.Node) -> None:  # noqa: ANN401
    """Raise CaptureError when a view that was taken before the write, and not by it, is used after it."""
    if not isinstance(root, fx.Node):
        return
    source = root
    while _is_view(source):  # perhaps a copy: it makes no difference when what it was made of is not used any more
        source = source.args[0]  # type: ignore[assignment]
        if any(reader in later for reader in source.users):
            raise CaptureError(
                f"{write.target} writes into what may be a part of {source.name}, which is used afterwards"
            )
    front = [root]
    while front:
        for user in front.pop().users:
            if user in later or not _is_view(user):
                continue
            front.append(user)
            if user not in chain and any(reader in later for reader in user.users):
                raise CaptureError(f"{write.target} writes into a tensor whose part {user.name} is used afterwards")


def _use_afterwards(old: Any, new: fx.Node, later: set[fx.Node]) -> None:  # noqa: ANN401
    if isinstance(old, fx.Node):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
