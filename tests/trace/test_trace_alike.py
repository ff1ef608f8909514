import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.trace.alike import ALIKE_OP, groups_of
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface

PAST, NEW = Dim("P", min=1), Dim("S", min=1)


def test_tensors_are_alike_in_shape_dtype_and_free_lengths():
    wide, other = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    tensors = [wide, other, wide, wide, torch.zeros(2, 4), wide, wide]
    dims = [{0: PAST}, {0: PAST}, {0: PAST}, {0: PAST}, {0: PAST}, {0: PAST}, {0: NEW}]
    assert groups_of(tensors, dims) == [[0, 2, 3, 5], [1], [4], [6]]


def test_few_that_are_alike_stay_by_themselves():
    assert groups_of([torch.zeros(2)] * 3, [{}] * 3) == [[0], [1], [2]]


class Weighted(nn.Module):
    """Each input counts differently; one is written into, one is a result, one is not used."""

    def forward(self, x, parts):
        parts[2].add_(1)
        total = sum(part * (at + 1) for at, part in enumerate(parts) if at != 4)
        return x.sum() + total, parts[3], parts[2]


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_every_input_is_one_of_the_graph_again_in_its_place(mode):
    parts = [torch.zeros(3, 2) for _ in range(6)]
    module = Weighted()
    interface = Interface(
        module=module,
        args=(torch.zeros(4), parts),
        dynamic_shapes=(None, [{0: PAST}] * 6),
        input_names=("x", *(f"part_{at}" for at in range(6))),
        output_names=("total", "third", "second"),
        weight_owner=module,
    )
    captured = capture(interface, torch.float32, mode)
    assert [name for _, name in captured.inputs] == list(interface.input_names)
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    assert {node for node, _ in captured.inputs} == set(placeholders)
    assert not [node for node in captured.graph.nodes if node.target is ALIKE_OP]
    assert list(captured.symbols.values()) == ["P"]

    values = [torch.randn(4), *(torch.randn(5, 2) for _ in range(6))]
    by_node = dict(zip((node for node, _ in captured.inputs), values, strict=True))
    runner = torch.fx.Interpreter(torch.fx.GraphModule({}, captured.graph))
    got = runner.run(*(by_node[node] for node in placeholders))
    want = module(values[0], [value.clone() for value in values[1:]])
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
