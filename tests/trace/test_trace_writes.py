"""Programs of views and writes, written at random: without the writes their graphs give what the programs give."""

import random

import pytest
import torch
from torch import fx

from t2n_hf.errors import CaptureError
from t2n_hf.trace import dispatch_trace
from t2n_hf.trace.passes.writes import replace_writes

X = torch.arange(24.0).reshape(4, 6) / 7

VIEWS = (
    lambda x: x[0],
    lambda x: x[-1:],
    lambda x: x[..., 1:],
    lambda x: x[..., ::2],
    lambda x: x.transpose(0, -1),
    lambda x: x.permute(*reversed(range(x.ndim))),
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(0),
    lambda x: x.view(-1) if x.is_contiguous() else x[1:],
    lambda x: x.chunk(2, dim=-1)[0],
    lambda x: x.split(2)[-1],
    lambda x: x.unbind(-1)[1] if x.shape[-1] > 1 else x,
    lambda x: x.detach(),
)
WRITES = (
    lambda x, other: x.add_(other.sum()),
    lambda x, other: x.mul_(2),
    lambda x, other: x.zero_(),
    lambda x, other: x.copy_(other.mean().expand(x.shape)),
    lambda x, other: x.fill_(3),
    lambda x, other: x.masked_fill_(x > 1, 0.5),
)


def program(seed):
    """A function of views, writes and sums, and what it chose, as text."""

    def run(x):
        choose = random.Random(seed)
        live = [x.clone(), x * 2]
        for _ in range(choose.randrange(3, 9)):
            tensor = choose.choice(live)
            if choose.random() < 0.5 and tensor.ndim and tensor.numel() > 1:
                live.append(choose.choice(VIEWS)(tensor))
            else:
                result = choose.choice(WRITES)(tensor, choose.choice(live))
                if choose.random() < 0.3:
                    live.append(result)
            if choose.random() < 0.2:
                live.append(choose.choice(live) + 1)
        return [tensor * 1 for tensor in live]

    return run


def without_writes(function, x):
    module = dispatch_trace(function, (x,))
    replace_writes(module.graph)
    module.graph.lint()
    assert not any(
        getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in module.graph.nodes
    )
    return fx.Interpreter(module)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_program_without_its_writes_gives_the_same(seed, mode):
    with mode():
        function = program(seed)
        torch.testing.assert_close(without_writes(function, X).run(X - 1), function(X - 1))


def test_what_may_be_a_copy_and_is_used_afterwards_is_refused():
    def function(x):
        y = x.clone()
        flat = y.reshape(-1)
        y.add_(1)
        return flat * 1

    with torch.inference_mode(), pytest.raises(CaptureError, match="used afterwards"):
        without_writes(function, X)


def test_parts_of_a_list_that_are_written_and_the_whole_agree():
    def function(x):
        y = x.clone()
        first, second = y.chunk(2, dim=1)
        low, high = y.split([1, 3])
        first.add_(1)
        high.mul_(2)
        rows = y.unbind(0)
        rows[2].zero_()
        return y, second * 1, low * 1, first * 1, rows[0] * 1

    torch.testing.assert_close(without_writes(function, X).run(X), function(X))
