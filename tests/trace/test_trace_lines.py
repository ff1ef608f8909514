import sys

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from t2n_hf.trace.lines import lines_noted
from t2n_hf.trace.quick_proxies import quick_proxies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        doubled = x * 2
        return self.norm(doubled)


def lines(noted):
    model = Model().eval()

    def body(x):
        if not noted:
            return model(x)
        with lines_noted(get_proxy_mode().tracer, sys._getframe(0)):
            return model(x)

    body._orig_mod = model
    graph = make_fx(body, pre_dispatch=True, record_module_stack=True, _allow_non_fake_inputs=True)(torch.ones(3, 4))
    return [node.meta.get("stack_trace") for node in graph.graph.nodes if node.op == "call_function"]


def test_lines_are_those_that_torch_notes():
    found = lines(noted=True)
    assert found == lines(noted=False)
    assert "doubled = x * 2" in found[0]
    assert "return self.norm(doubled)" in found[-1]


def test_nothing_is_left_on_a_tracer_or_a_mode():
    def body(x):
        mode = get_proxy_mode()
        before = dict(vars(mode)), dict(vars(mode.tracer))
        with quick_proxies():
            assert "__torch_dispatch__" in vars(mode)
            y = x + 1
        assert vars(mode).keys() == before[0].keys()
        assert vars(mode.tracer).keys() == before[1].keys()
        assert mode.tracer.record_stack_traces == before[1]["record_stack_traces"]
        return y

    body._orig_mod = nn.Identity()
    make_fx(body, pre_dispatch=True, record_module_stack=True, _allow_non_fake_inputs=True)(torch.ones(3))


def test_a_block_without_a_trace_changes_nothing():
    with quick_proxies():
        assert (torch.ones(2) + 1).tolist() == [2, 2]
