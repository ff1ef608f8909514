"""Nodes that nothing uses."""

from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["drop_dead_code"]


def drop_dead_code(graph: fx.Graph) -> PassResult:
    """Remove calls and attributes without a user. Placeholders, in-place calls and everything in use are kept."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not _writes(node):
            graph.erase_node(node)
            changed = True
    return PassResult(graph, changed)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
