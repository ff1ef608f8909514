"""Operators that have no emitter, written as the ones that torch itself says they are made of."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from t2n_hf.trace.captured import CapturedGraph

__all__ = ["decompose_unknown"]


def decompose_unknown(captured: CapturedGraph, known: Container[Any]) -> None:
    """Replace calls of operators that are not in `known` by calls of operators that are, where torch says how.

    Values are kept. A call stays as it is when torch has no decomposition of it, when that needs an operator that is
    not in `known` either, or when it holds for the lengths of the examples alone.
    """
    graph = captured.graph
    instead: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target not in known and _has_decomposition(node.target):
            _replace(graph, node, known, instead)
    if instead:
        graph.eliminate_dead_code()
        captured.outputs[:] = [(instead.get(node, node), name) for node, name in captured.outputs]


def _has_decomposition(target: Any) -> bool:  # noqa: ANN401 - what a node calls
    return isinstance(target, torch._ops.OpOverload) and (target in decomposition_table or _is_composite(target))


def _replace(graph: fx.Graph, node: fx.Node, known: Container[Any], instead: dict[fx.Node, fx.Node]) -> None:
    sources = list(node.all_input_nodes)
    traced = _traced(node, sources, known)
    if traced is None:
        return
    places = [place for place in traced.nodes if place.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(places, sources, strict=True))
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(traced, copies)
    for old, new in copies.items():
        if old.op != "placeholder":
            new.meta = {**node.meta, "val": old.meta.get("val")}
    if isinstance(result, fx.Node):
        _swap(node, result, instead)
    else:
        for user in list(node.users):  # operator.getitem
            _swap(user, result[user.args[1]], instead)
        graph.erase_node(node)


def _swap(node: fx.Node, result: fx.Node, instead: dict[fx.Node, fx.Node]) -> None:
    node.replace_all_uses_with(result)
    instead[node] = result
    node.graph.erase_node(node)


def _traced(node: fx.Node, sources: list[fx.Node], known: Container[Any]) -> fx.Graph | None:
    """The graph of a decomposition, all of whose calls are known, with one placeholder for each source."""
    values = [source.meta["val"] for source in sources]
    fakes = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    if not fakes or not all(isinstance(value, torch.Tensor | torch.SymInt) for value in values):
        return None
    mode = fakes[0].fake_mode  # type: ignore[attr-defined]
    table = {op: rule for op, rule in decomposition_table.items() if op not in known}
    # What torch itself calls keeps operators whole that the rules of the table take apart (Fourier transforms).
    whole = {op: rule for op, rule in table.items() if not _is_composite(op)}
    attempts = [(node.target.decompose, whole)] if _is_composite(node.target) else []  # type: ignore[union-attr]
    attempts += [(table[node.target], table)] if node.target in table else []
    for rule, rules in attempts:
        graph = _tried(node, rule, rules, dict(zip(sources, values, strict=True)), mode)
        if graph is not None and all(_is_known(inner, known) for inner in graph.nodes):
            return graph
    return None


def _is_composite(target: Any) -> bool:  # noqa: ANN401 - what a rule is for
    return isinstance(target, torch._ops.OpOverload) and target._can_decompose()


def _tried(
    node: fx.Node,
    rule: Callable[..., Any],
    rules: Mapping[Any, Any],
    values: Mapping[fx.Node, Any],
    mode: FakeTensorMode,
) -> fx.Graph | None:
    """The graph of one rule, in which further `rules` are followed; None when it fixes a length."""

    def call(*given: Any) -> Any:  # noqa: ANN401 - fake tensors and symbols
        by_source = dict(zip(values, given, strict=True))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), by_source.__getitem__)
        return rule(*args, **kwargs)

    before = len(mode.shape_env.guards) if mode.shape_env is not None else 0
    try:
        # Without the Python dispatcher torch asks for some lengths as numbers, which would fix them.
        with mode, enable_python_dispatcher(), torch.no_grad():
            graph = make_fx(call, decomposition_table=rules)(*values.values()).graph
    except Exception:  # noqa: BLE001 - whatever it is, the operator is then reported as missing
        return None
    if mode.shape_env is not None and len(mode.shape_env.guards) > before:
        return None
    graph.eliminate_dead_code()
    return graph


def _is_known(node: fx.Node, known: Container[Any]) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool)
    return node.op == "call_function" and (number or node.target in known)
