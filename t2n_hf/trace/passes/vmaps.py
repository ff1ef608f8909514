"""Calls of `torch.vmap`, as calls of operators on whole tensors."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch._functorch import predispatch
from torch._higher_order_ops.flat_apply import flat_apply
from torch.fx.experimental.proxy_tensor import make_fx

from t2n_hf.errors import CaptureError
from t2n_hf.trace.passes.result import PassResult

__all__ = ["expand_vmaps"]

_aten = torch.ops.aten
_BEGIN: Final = predispatch._vmap_increment_nesting
_END: Final = predispatch._vmap_decrement_nesting
# How masks of transformers look up what is at a position that vmap goes through.
_INDEXING: Final = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"


def expand_vmaps(graph: fx.Graph) -> PassResult:
    """Replace what torch.export leaves of `vmap` (begin, the calls for one element, end) by calls for all elements.

    Values are kept.

    Raises:
        CaptureError: torch cannot say what the calls for all elements are, or only for the lengths of the example.
    """
    found = list(_vmaps(graph))
    for nodes in found:
        _replace(graph, nodes)
    for node in graph.find_nodes(op="call_function", target=predispatch.lazy_load_decompositions):
        graph.erase_node(node)
    return PassResult(graph, bool(found))


def _vmaps(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost vmap, in order."""
    depth, nodes = 0, list[fx.Node]()
    for node in graph.nodes:
        depth += node.target is _BEGIN
        if depth:
            nodes.append(node)
        if node.target is _END:
            depth -= 1
            if depth == 0:
                yield nodes
                nodes = []


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    inside = set(nodes)
    called = [node for node in nodes if node.op == "call_function"]
    sources = list(dict.fromkeys(source for node in called for source in node.all_input_nodes if source not in inside))
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    traced = _traced(called, sources, results)
    places = [place for place in traced.nodes if place.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(places, sources, strict=True))
    with graph.inserting_before(nodes[0]):
        values: Any = graph.graph_copy(traced, copies)
    for old, new in copies.items():
        if old.op != "placeholder":
            new.meta = {**results[0].meta, "val": old.meta.get("val")}
    for result, value in zip(results, values, strict=True):
        result.replace_all_uses_with(value)
    for node in reversed(nodes):
        graph.erase_node(node)


def _traced(nodes: list[fx.Node], sources: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
    """The calls once more, below vmap: what it makes of them is what is traced."""

    def run(*given: Any) -> list[torch.Tensor]:  # noqa: ANN401 - fake tensors and symbols
        known = dict(zip(sources, given, strict=True))
        depth = 0
        try:
            for node in nodes:
                if node.target is flat_apply:
                    known[node] = _indexed(node, known)
                    continue
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                depth += (node.target is _BEGIN) - (node.target is _END)
        finally:
            for _ in range(depth):  # what failed half way must not leave the process below a vmap
                torch._C._functorch._vmap_decrement_nesting()
        return [known[node] for node in results]

    values = [source.meta["val"] for source in sources]
    mode = next(value.fake_mode for value in values if isinstance(value, torch._subclasses.FakeTensor))
    before = len(mode.shape_env.guards) if mode.shape_env is not None else 0
    try:
        with mode, torch.no_grad():
            traced = make_fx(run)(*values).graph
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"what vmap does to {results[0].name} cannot be traced: {error}") from error
    if mode.shape_env is not None and len(mode.shape_env.guards) > before:
        raise CaptureError(f"what vmap does to {results[0].name} depends on the lengths of the example")
    traced.eliminate_dead_code()
    return traced


def _indexed(node: fx.Node, known: dict[fx.Node, Any]) -> torch.Tensor:
    if node.args[2] != _INDEXING:
        raise CaptureError(f"vmap goes through {node.args[2]}, which is no operator; write it with operators")
    tensor, *places = fx.node.map_arg(node.args[3:], known.__getitem__)
    return _aten.index.Tensor(tensor, places)
