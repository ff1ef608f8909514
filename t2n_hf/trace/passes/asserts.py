"""Checks that the tracer left in the graph: of dtypes, of lengths, and switches of torch's own state."""

from typing import Final

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["drop_asserts"]

_aten = torch.ops.aten

_CHECKS: Final = frozenset(
    {
        _aten._assert_async.default,
        _aten._assert_async.msg,
        _aten._assert_scalar.default,
        _aten._assert_tensor_metadata.default,
        _aten._functional_assert_async.msg,
        _aten._functional_assert_scalar.default,
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
        torch._C._set_grad_enabled,
        torch._check,
    }
)


def drop_asserts(graph: fx.Graph) -> PassResult:
    """Remove nodes that only check something. Values, order and the other nodes' names are kept."""
    checks = [node for node in graph.nodes if node.op == "call_function" and node.target in _CHECKS and not node.users]
    for node in checks:
        graph.erase_node(node)
    return PassResult(graph, bool(checks))
