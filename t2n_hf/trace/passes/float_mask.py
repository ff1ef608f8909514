"""Boolean attention masks."""

from typing import Any

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["float_masks"]

_aten = torch.ops.aten
_MASK = 3  # position of attn_mask


def float_masks(graph: fx.Graph) -> PassResult:
    """Give attention a mask to add (0, or the least finite number) instead of a boolean one; one per boolean mask.

    The new mask, "attention_mask", follows the boolean one, so that layers can share it. A row that is masked
    everywhere then attends evenly to all positions: finite, where torch gives 0.
    """
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node.target is not _aten.scaled_dot_product_attention.default:
            continue
        mask, rest = _mask_of(node)
        if mask is None or mask.meta["val"].dtype is not torch.bool:
            continue
        dtype = node.meta["val"].dtype
        if (mask, dtype) not in made:
            made[mask, dtype] = _insert(graph, mask, dtype)
        node.args, node.kwargs = (*node.args[:_MASK], made[mask, dtype], *node.args[_MASK + 1 :]), rest
        changed = True
    return PassResult(graph, changed)


def _mask_of(node: fx.Node) -> tuple[fx.Node | None, dict[str, Any]]:
    rest = {key: value for key, value in node.kwargs.items() if key != "attn_mask"}
    mask: Any = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    return mask, rest


def _insert(graph: fx.Graph, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    after = mask
    while after.next.op == "placeholder":
        after = after.next
    value = mask.meta["val"]
    with graph.inserting_after(after), value.fake_mode:
        result = graph.create_node(
            "call_function", _aten.where.Scalar, (mask, 0.0, torch.finfo(dtype).min), name="attention_mask"
        )
        result.meta = {"val": torch.empty_like(value, dtype=torch.float32)}
    if dtype is torch.float32:
        return result
    with graph.inserting_after(result), value.fake_mode:
        cast = graph.create_node("call_function", _aten.to.dtype, (result, dtype), name="attention_mask")
        cast.meta = {"val": torch.empty_like(value, dtype=dtype)}
    return cast
