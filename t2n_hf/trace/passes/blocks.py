"""Blocks that change torch's own settings (`torch.autocast`, `torch.enable_grad`), as the calls that are in them.

torch.export makes a graph of its own of each such block. Neither gradients nor automatic types for another device mean
anything to a graph that only computes forwards; automatic types for this one are refused while it is traced.
"""

from typing import Any, Final

import torch
from torch import fx

__all__ = ["inline_blocks"]

# How many arguments stand before the graph of the block.
_SETTINGS: Final = {
    torch.ops.higher_order.wrap_with_autocast: 4,
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
}
_ENTER: Final = torch.amp.autocast_mode._enter_autocast
_EXIT: Final = torch.amp.autocast_mode._exit_autocast


def inline_blocks(module: fx.GraphModule) -> None:
    """Put the calls of the blocks of a graph in the places of the blocks, in place. Values are kept."""
    for target in (_EXIT, _ENTER):  # torch.export leaves these of a block within a block
        for node in module.graph.find_nodes(op="call_function", target=target):
            module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        before = _SETTINGS.get(node.target) if node.op == "call_function" else None
        if before is not None:
            held: Any = node.args[before]
            inner: Any = module.get_submodule(held.target)
            inline_blocks(inner)
            _inline(module, node, inner, node.args[before + 1 :])
            if not held.users:
                module.graph.erase_node(held)


def _inline(module: fx.GraphModule, node: fx.Node, inner: fx.GraphModule, given: Any) -> None:  # noqa: ANN401
    graph = module.graph
    places = [place for place in inner.graph.nodes if place.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(places, given, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(inner.graph, copies)
    if isinstance(results, tuple | list):
        for item in list(node.users):  # operator.getitem
            place: Any = item.args[1]
            item.replace_all_uses_with(results[place])
            graph.erase_node(item)
    else:
        node.replace_all_uses_with(results)
    graph.erase_node(node)
