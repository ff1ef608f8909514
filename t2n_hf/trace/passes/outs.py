"""Results written into tensors that the caller gives (`torch.add(x, y, out=z)`), as results copied into them."""

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError
from t2n_hf.places import source_line
from t2n_hf.trace.passes.result import PassResult
from t2n_hf.trace.passes.writes import is_view

__all__ = ["copy_outs"]

_aten: Final = torch.ops.aten
# What a function that makes a tensor may take beside what its form with a given tensor takes.
_OF_TENSORS: Final = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "requires_grad"})


def copy_outs(graph: fx.Graph) -> PassResult:
    """Replace each call that has `out=` by the one without, and `copy_` of its result. Values are kept.

    Raises:
        CaptureError: torch has no form without `out=`, or gives a tensor another shape that others may look at.
    """
    found = [(node, list(_outs(node))) for node in graph.nodes if node.op == "call_function"]
    found = [(node, names) for node, names in found if names]
    for node, names in found:
        _replace(graph, node, names)
    return PassResult(graph, bool(found))


def _outs(node: fx.Node) -> Iterator[str]:
    schema = getattr(node.target, "_schema", None)
    for argument in schema.arguments if schema is not None else ():
        if argument.is_out and isinstance(node.kwargs.get(argument.name), fx.Node):
            yield argument.name


def _replace(graph: fx.Graph, node: fx.Node, names: list[str]) -> None:
    outs: list[Any] = [node.kwargs[name] for name in names]
    target = _without_outs(node.target)
    options = {name: value for name, value in node.kwargs.items() if name not in names}
    extra = {argument.name for argument in target._schema.arguments} - {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    if "dtype" in extra:
        options["dtype"] = outs[0].meta["val"].dtype
    with graph.inserting_before(node):
        value = _called(graph, target, node.args, options, node)
        results = [value] if len(outs) == 1 else [_item(graph, value, place) for place in range(len(outs))]
        written = [_written(graph, out, result, node) for out, result in zip(outs, results, strict=True)]
    if len(outs) == 1:
        node.replace_all_uses_with(written[0])
    for user in list(node.users):  # operator.getitem
        place: Any = user.args[1]
        user.replace_all_uses_with(written[place])
        graph.erase_node(user)
    graph.erase_node(node)


def _without_outs(target: Any) -> Any:  # noqa: ANN401 - an OpOverload
    """`aten.add.out` -> `aten.add.Tensor`: what they take is what tells."""
    taken = _takes(target)
    packet = getattr(_aten, target._schema.name.removeprefix("aten::"))
    for overload in [getattr(packet, name) for name in packet.overloads()]:
        written = any(one.alias_info is not None and one.alias_info.is_write for one in overload._schema.arguments)
        if not written and _takes(overload) == taken and overload._schema.returns:
            return overload
    raise CaptureError(f"{target} writes into a tensor that it is given, and torch has no form of it that does not")


def _takes(overload: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - an OpOverload
    arguments = [one for one in overload._schema.arguments if not one.is_out]
    of_tensors = [one.name for one in arguments if one.kwarg_only and one.name in _OF_TENSORS - {"dtype"}]
    given = bool(of_tensors)  # then its dtype is that of what it makes, which `out` says
    return [
        (str(one.type), one.name)
        for one in arguments
        if one.name not in of_tensors and not (given and one.name == "dtype")
    ]


def _called(graph: fx.Graph, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:  # noqa: ANN401
    """A call with the stand-in of its result."""
    node = graph.call_function(target, args, kwargs)
    values: Any = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    mode = next(leaf.fake_mode for leaf in pytree.tree_leaves(like.meta["val"]) if isinstance(leaf, FakeTensor))
    with mode, torch.no_grad():
        node.meta = {**like.meta, "val": target(*values[0], **values[1])}
    return node


def _item(graph: fx.Graph, values: fx.Node, place: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (values, place))
    item.meta = {**values.meta, "val": values.meta["val"][place]}
    return item


def _written(graph: fx.Graph, out: fx.Node, result: fx.Node, node: fx.Node) -> fx.Node:
    mine, given = out.meta["val"], result.meta["val"]
    if [str(length) for length in mine.shape] == [str(length) for length in given.shape]:
        copy = graph.call_function(_aten.copy_.default, (out, result))
        copy.meta = {**node.meta, "val": mine}
        return copy
    if mine.numel() != 0 or out.op != "call_function" or is_view(out) or any(map(is_view, out.users)):
        raise CaptureError(
            f"{node.target} gives its `out`, of shape {tuple(mine.shape)}, the shape {tuple(given.shape)}, at "
            f"{source_line(node) or 'an unknown line'}; give it one of that shape"
        )
    cast = _called(graph, _aten.to.dtype, (result, mine.dtype), {}, result)
    later = node
    while later.op != "output":
        later = later.next
        later.replace_input_with(out, cast)
    return cast
