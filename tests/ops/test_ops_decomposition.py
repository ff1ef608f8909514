"""Operators without an emitter of their own, written by the rules that torch has for them."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, interface_for
from torch._dynamo import config as dynamo_config

from t2n_hf.errors import MissingEmittersError
from t2n_hf.export.decompose import decompose_unknown
from t2n_hf.export.lower import emitter_table, lower
from t2n_hf.trace.capture import capture

aten = torch.ops.aten
X = floats(2, 5, 4)
S = {(0, 1): "S"}
OTHERS = ((floats(2, 9, 4),), (floats(2, 1, 4),))


def one(name, function, **options):
    return Case(name, function, (X,), S, OTHERS, tolerance=1e-5, **options)


CASES = [
    one("one_result", lambda x: torch.special.entr(x.abs())),
    one("several_results", lambda x: torch.dsplit(x, [1, 3])),
    one("one_of_several_results", lambda x: torch.dsplit(x, [1, 3])[1] * 2),
    one("result_is_an_output_twice", lambda x: (torch.special.expit(x),) * 2),
    one("arguments_by_name", lambda x: torch.special.logit(x.sigmoid(), eps=0.2)),
    one("length_as_argument", lambda x: torch.special.xlog1py(x, x.abs()) * x.shape[1]),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("decomposition"))


@pytest.mark.tract
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)


def captured(function, lengths=S):
    return capture(interface_for(Case("case", function, (X,), lengths)), torch.float32, "whole")


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_calls_that_are_known_stay():
    graph = captured(lambda x: x.softmax(-1))
    decompose_unknown(graph, {aten.softmax.int})
    assert targets(graph) == [aten.softmax.int]


def test_a_call_whose_parts_are_not_all_known_stays():
    graph = captured(lambda x: torch.special.entr(x))
    decompose_unknown(graph, {aten.isnan.default, aten.gt.Scalar})
    assert targets(graph) == [aten.special_entr.default]


def test_parts_are_decomposed_in_turn():
    graph = captured(lambda x: torch.special.xlog1py(x, x))
    decompose_unknown(graph, set(emitter_table().overloads()))
    assert aten.special_xlog1py.default not in targets(graph)
    assert all(target in emitter_table() for target in targets(graph))


def test_what_has_no_rule_is_reported():
    graph = captured(lambda x: torch.special.airy_ai(x @ x.mT))
    with pytest.raises(MissingEmittersError, match=r"special_airy_ai"):
        lower(graph, {}, dtype="f32")


def test_what_is_written_keeps_the_place_it_comes_from():
    graph = captured(lambda x: torch.special.entr(x))
    traces = {node.meta["stack_trace"] for node in graph.graph.nodes if node.op == "call_function"}
    decompose_unknown(graph, set(emitter_table().overloads()))
    assert {node.meta["stack_trace"] for node in graph.graph.nodes if node.op == "call_function"} == traces


def test_the_parts_of_a_call_do_not_fix_a_length_whether_torch_remembers_their_results_or_not():
    with dynamo_config.patch(fake_tensor_cache_enabled=False):
        graph = captured(lambda x: torch.fft.fftn(x, dim=(1, 2)).real)
        decompose_unknown(graph, {aten._fft_c2c.default, aten._to_copy.default, aten.real.default})
    assert aten._fft_c2c.default in targets(graph)
