"""Writes into parts of tensors, as calls that give the whole tensor anew."""

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import fx

from t2n_hf.errors import CaptureError
from t2n_hf.trace.passes.aliases import is_idle_dropout
from t2n_hf.trace.passes.result import PassResult

__all__ = ["is_view", "owner_of", "refuse_kept_writes", "replace_writes", "writes"]

_aten = torch.ops.aten


def replace_writes(graph: fx.Graph) -> PassResult:
    """Replace writes (`x.add_(y)`, `x[:, 1:] = y`, `x[0].fill_(1)`) by calls that give the whole tensor anew.

    Values are kept: whatever used the tensor after the write uses the new one, and what used a view of it uses the same
    view of the new one.

    Raises:
        CaptureError: a write through a view that repeats elements or may be a copy; one that something which may be a
            copy, and is used afterwards, would see; one by an operator that has no form without the write.
    """
    anew: set[fx.Node] = set()  # tensors of their own, although the calls that make them are views by their form
    for node in list(graph.nodes):
        if writes(node) and isinstance(node.args[0], fx.Node):
            _take_lists_apart(graph, node, anew)
            anew.add(_replace(graph, node, anew))
    return PassResult(graph, bool(anew))


def refuse_kept_writes(graph: fx.Graph, kept: Mapping[fx.Node, str]) -> None:
    """Raise CaptureError when the graph writes into one of `kept`: the tensors that a module holds, by name.

    The next call of the module would see what was written; an archive's tensors stay as they are.
    """
    for node in graph.nodes:
        if not writes(node):
            continue
        root: Any = node.args[0]
        while isinstance(root, fx.Node) and (is_view(root) or _is_item(root) or is_idle_dropout(root)):
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


def writes(node: fx.Node) -> bool:
    """Whether a call changes elements of its first argument."""
    alias = _alias(node)
    if node.op != "call_function" or alias is None or not alias.is_write or node.target in _NO_ELEMENTS:
        return False
    return not is_idle_dropout(node)


def is_view(node: fx.Node) -> bool:
    """Whether a call only looks at its first argument in another way."""
    if node.op != "call_function":
        return False
    alias = _alias(node)
    # Its schema says nothing of it, but it is a view: kron writes into one.
    return node.target is _aten._unsafe_view.default or (alias is not None and not alias.is_write)


def _views_to(node: fx.Node, anew: set[fx.Node]) -> list[fx.Node]:
    """The views that lead from a tensor of its own to this one, first view first."""
    chain: list[fx.Node] = []
    while is_view(node) and node not in anew and node.target not in _PERHAPS_COPIES:
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _replace(graph: fx.Graph, node: fx.Node, anew: set[fx.Node]) -> fx.Node:
    """Replace one write; gives the whole tensor as it is afterwards."""
    chain = _views_to(node.args[0], anew)  # type: ignore[arg-type]
    root: Any = chain[0].args[0] if chain else node.args[0]
    later = set(_after(node))
    _refuse_copies(root, later, node, anew)
    again = any(writes(write) and owner_of(write.args[0], anew) is owner_of(root, anew) for write in later)
    with graph.inserting_after(node):
        value = _pure(graph, node)
    last = value
    for view in reversed(chain):
        with graph.inserting_after(last):
            last = _put_back(graph, view, last, node)
    renewed = _same_views(graph, root, last, later, anew)
    # What is written again has to be seen as a part of the whole; else the value itself is shorter.
    result = renewed[chain[-1]] if chain and again else value
    if chain and not again:
        renewed[chain[-1]] = value
    for old, new in renewed.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    for fresh in reversed([new for new in renewed.values() if new is not last and new is not value]):
        if not fresh.users:
            graph.erase_node(fresh)
    return last


def owner_of(node: Any, anew: Collection[fx.Node] = ()) -> Any:  # noqa: ANN401 - a node
    """The tensor of its own that a node is, or shows a part of, or wrote to."""
    while isinstance(node, fx.Node) and node not in anew and (is_view(node) or writes(node) or _is_item(node)):
        node = node.args[0]
    return node


def _views_of(root: fx.Node, later: set[fx.Node], anew: set[fx.Node]) -> list[fx.Node]:
    """The views of a tensor that were taken before a write, in the order of the graph."""
    found: dict[fx.Node, None] = {}
    front = [root]
    while front:
        for user in front.pop().users:
            if user not in later and user not in anew and is_view(user):
                found[user] = None
                front.append(user)
    return sorted(found)


def _same_views(
    graph: fx.Graph, root: fx.Node, whole: fx.Node, later: set[fx.Node], anew: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The tensor as it is after a write, and the views of it that there were, taken again."""
    renewed, place = {root: whole}, whole
    for view in _views_of(root, later, anew):
        source = renewed.get(view.args[0])  # type: ignore[arg-type]
        if source is None or view.target in _PERHAPS_COPIES:
            continue
        with graph.inserting_after(place):
            place = graph.call_function(view.target, (source, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
        place.meta = dict(view.meta)
        renewed[view] = place
    return renewed


def _pure(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The call without its write, with the result in the dtype of the tensor that was written to."""
    target = _without_write(node.target)
    value = graph.call_function(target, node.args, node.kwargs)
    value.meta = dict(node.meta)
    written, given = node.meta["val"], _result_dtype(target, node)
    if given == written.dtype:
        return value
    value.meta["val"] = written.new_empty(written.shape, dtype=given)
    with graph.inserting_after(value):
        cast = graph.call_function(_aten.to.dtype, (value, written.dtype))
    cast.meta = dict(node.meta)
    return cast


_QUESTIONS: Final = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "greater", "greater_equal", "less", "less_equal", "not_equal"),
        *("logical_and", "logical_or", "logical_xor", "logical_not"),
    }
)
_ARITHMETIC: Final = frozenset(
    {
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide"),
        *("remainder", "fmod", "pow", "atan2", "arctan2", "hypot", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("__and__", "__or__", "__xor__"),
    }
)


def _result_dtype(target: Any, node: fx.Node) -> torch.dtype:  # noqa: ANN401 - an OpOverload
    """What the call without a write gives: a write keeps the dtype of its tensor, whatever is compared or added."""
    name = target._schema.name.removeprefix("aten::")
    written: torch.dtype = node.meta["val"].dtype
    if name in _QUESTIONS:
        return torch.bool
    other = node.args[1] if len(node.args) > 1 else None
    if name in _ARITHMETIC and isinstance(other, fx.Node) and isinstance(other.meta["val"], torch.Tensor):
        return torch.result_type(node.args[0].meta["val"], other.meta["val"])  # type: ignore[union-attr]
    return written


# In-place operators are called after the others, with an underscore at the end, but for these.
_TWINS: Final = {
    "__iand__": "__and__",
    "__ilshift__": "__lshift__",
    "__ior__": "__or__",
    "__irshift__": "__rshift__",
    "__ixor__": "__xor__",
}


def _without_write(target: Any) -> Any:  # noqa: ANN401 - an OpOverload
    """`aten.add_.Tensor` -> `aten.add.Tensor`, `aten.pow_.Scalar` -> `aten.pow.Tensor_Scalar`.

    Overloads of the two may have different names: what they take is what tells.
    """
    name = target._schema.name.removeprefix("aten::")
    twin = _TWINS.get(name) or (name.removesuffix("_") if name.endswith("_") else "")
    packet = getattr(_aten, twin, None) if twin else None
    names = packet.overloads() if packet is not None else []
    names = sorted(names, key=lambda each: each != target._overloadname)
    for pure in [getattr(packet, overload) for overload in names]:
        if _takes(pure) == _takes(target):
            return pure
    raise CaptureError(f"{target} writes into a tensor, and torch has no operator that does the same without")


def _takes(overload: Any) -> list[tuple[str, str, bool]]:  # noqa: ANN401 - an OpOverload
    """Type, name and kind of each argument; the first is the tensor, whatever its name."""
    arguments = overload._schema.arguments
    return [(str(one.type), one.name if place else "", one.kwarg_only) for place, one in enumerate(arguments)]


# Exchanged twice, axes are as they were; an alias has the same axes.
_TURNS: Final = frozenset({_aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default})
# The same elements in the same order; never a copy, as reshape and flatten may be.
_SHAPES: Final = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default),
        *(_aten.squeeze.dim, _aten.squeeze.dims),
    }
)
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


def _refuse_copies(root: Any, later: set[fx.Node], write: fx.Node, anew: set[fx.Node]) -> None:  # noqa: ANN401
    """Raise CaptureError when what may be a copy of the tensor, or what that may be a copy of, is used afterwards."""
    if not isinstance(root, fx.Node):
        return
    source = root
    while source not in anew and (is_view(source) or (_alias(source) is not None and not writes(source))):
        source = source.args[0]  # type: ignore[assignment]
        if any(reader in later for reader in source.users):
            raise CaptureError(
                f"{write.target} writes into what may be a part of {source.name}, which is used afterwards"
            )
    for view in _views_of(root, later, anew):
        if view.target in _PERHAPS_COPIES and any(reader in later for reader in _readers(view)):
            raise CaptureError(f"{write.target} writes into a tensor whose part {view.name} is used afterwards")


def _readers(view: fx.Node) -> Iterator[fx.Node]:
    for user in view.users:
        yield user
        if is_view(user):
            yield from _readers(user)


# Views that give several tensors, with the argument that says along which axis, and its place.
_LISTS: Final = {
    _aten.chunk.default: 2,
    _aten.split.Tensor: 2,
    _aten.split.sizes: 2,
    _aten.split_with_sizes.default: 2,
    _aten.tensor_split.indices: 2,
    _aten.tensor_split.sections: 2,
    _aten.unbind.int: 1,
}


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_view(node.args[0])


def _take_lists_apart(graph: fx.Graph, write: fx.Node, anew: set[fx.Node]) -> None:
    """Make slices of the items of `split`, `unbind` and the like, of the tensor that is written to."""
    owner = owner_of(write.args[0], anew)
    for item in [node for node in graph.nodes if _is_item(node) and owner_of(node, anew) is owner]:
        views: Any = item.args[0]
        lengths = [part.shape for part in views.meta["val"]]
        axis = views.args[_LISTS[views.target]] if len(views.args) > _LISTS.get(views.target, 0) else 0
        axis = views.kwargs.get("dim", axis)
        place: Any = item.args[1]
        with graph.inserting_before(item):
            if views.target is _aten.unbind.int:
                part = graph.call_function(_aten.select.int, (views.args[0], axis, place))
            else:
                ends = list(itertools.accumulate(shape[axis] for shape in lengths))
                if views.target not in _LISTS or not all(isinstance(end, int) for end in ends):
                    raise CaptureError(
                        f"{write.target} writes into a tensor that {views.target} takes apart; use slices instead"
                    )
                start = ends[place - 1] if place % len(ends) else 0
                part = graph.call_function(_aten.slice.Tensor, (views.args[0], axis, start, ends[place]))
        part.meta = dict(item.meta)
        item.replace_all_uses_with(part)
        graph.erase_node(item)


def _after(node: fx.Node) -> list[fx.Node]:
    found = []
    while node.next.op != "root":
        node = node.next
        found.append(node)
    return found
