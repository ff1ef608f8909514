"""What torch.export leaves of vmap becomes calls for all elements at once."""

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.trace.passes.vmaps import expand_vmaps


class Blocks(nn.Module):
    """A mask made for one pair of positions, as transformers make those that are not causal everywhere."""

    def forward(self, x, kinds):
        def seen(row, query, key):
            return (query >= key) | ((kinds[row, query] == kinds[row, key]) & (kinds[row, query] > 0))

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            seen = torch.vmap(seen, in_dims=dims)
        rows, length = kinds.shape
        with TransformGetItemToIndex():
            mask = seen(torch.arange(rows), torch.arange(length), torch.arange(length))
        return torch.where(mask, x, -1.0), torch.vmap(torch.sum)(x)


def inputs(rows, length):
    kinds = torch.randint(0, 3, (rows, length), generator=torch.Generator().manual_seed(length))
    return torch.randn(rows, length, length), kinds


def exported(module):
    rows, length = Dim("B", min=1), Dim("S", min=1)
    dims = ({0: rows, 1: length, 2: length}, {0: rows, 1: length})
    return torch.export.export(module, inputs(2, 5), dynamic_shapes=dims, strict=False).graph_module


def test_what_is_made_for_one_element_is_made_for_all_at_other_lengths_too():
    module = exported(Blocks())
    graph, changed = expand_vmaps(module.graph)
    assert changed
    graph.lint()
    assert all(isinstance(n.target, torch._ops.OpOverload) for n in graph.nodes if n.op == "call_function")
    module.recompile()
    for rows, length in ((2, 5), (1, 4), (3, 9), (2, 1)):
        given = inputs(rows, length)
        for got, expected in zip(module(*given), Blocks()(*given), strict=True):
            torch.testing.assert_close(got, expected)
    assert not expand_vmaps(graph).changed


def test_a_function_that_is_no_operator_is_refused_inside_vmap():
    graph = exported(Blocks()).graph
    for node in graph.nodes:
        if "ModIndex" in str(node.args[2:3]):
            node.update_arg(2, "somewhere.Function")
    with pytest.raises(CaptureError, match=r"somewhere\.Function, which is no operator"):
        expand_vmaps(graph)
    assert torch._C._functorch.maybe_current_level() is None  # the process is not left below a vmap
