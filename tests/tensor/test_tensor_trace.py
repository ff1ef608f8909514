"""Tracers of torch over models of references: the operator that stands for a weight, and views without values."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.errors import ConfigError, InPlaceError, UnsupportedOpError
from t2n_hf.ops.table import EMITTERS
from t2n_hf.tensor import (
    OffloadedTensor,
    OpaqueTensorRef,
    QTensorTractScaleOnly,
    find_opaque_ref_by_py_id,
    set_opaque_tensor_in_params_as_ref,
)
from t2n_hf.views import EXPANSIONS, PARTS, RESHAPES, SAME, TURNS, VIEW_NAMES, overloads_of

ROWS = torch.tensor([3, 1])
OPERATOR = "t2n_hf::opaque_tensor_expand"


def packed():
    return QTensorTractScaleOnly.quantize(torch.randn(32, 64))


def offloaded_packed():
    return OffloadedTensor.from_original_tensor(packed(), "w")


def offloaded_plain():
    return OffloadedTensor.from_original_tensor(torch.randn(32, 64), "w")


class Uses(nn.Module):
    """Computes `use(x, weight, buffer)`."""

    def __init__(self, weight, use):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("buffer", torch.randn(32 * 64))
        self.use = use

    def forward(self, x):
        return self.use(x, self.weight, self.buffer)


def traced(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(model, x, check_trace=False)  # noqa: TID251 - what is tested is being traced by it


SUPPORTED = {
    "linear": lambda x, w, b: F.linear(x, w),
    "transposed": lambda x, w, b: x @ w.T,
    "a chain of views": lambda x, w, b: F.linear(x, w.view(2, 16, 64)[1].reshape(4, 4, 64).flatten(0, 1)),
    "a part": lambda x, w, b: torch.matmul(x, w.split(8)[1].t()),
    "batched": lambda x, w, b: torch.bmm(x.unsqueeze(0), w.t().unsqueeze(0)),
    "the whole with a buffer": lambda x, w, b: x + (w * b.view_as(w)).sum(),
    "rows": lambda x, w, b: x + F.embedding(ROWS, w) + w[ROWS],
    "device and dtype": lambda x, w, b: x.to(w.device, w.dtype) @ w.t(),
    "a view that is moved": lambda x, w, b: x[0] + w.view(-1)[:64].to(x.device),
    "shape of another": lambda x, w, b: F.linear(x, b.view_as(w)),
}


@pytest.mark.parametrize("make", [packed, offloaded_packed, offloaded_plain])
@pytest.mark.parametrize("use", SUPPORTED)
def test_a_trace_computes_what_the_model_does_and_refers_to_the_weight(make, use):
    x = torch.randn(2, 64)
    model = Uses(make(), SUPPORTED[use])
    expected = model(x)
    set_opaque_tensor_in_params_as_ref(model)
    trace = traced(model, x)
    assert torch.allclose(trace(x), expected, atol=1e-5)
    x = torch.randn(2, 64)
    assert torch.allclose(trace(x), SUPPORTED[use](x, model.weight.opaque_tensor, model.buffer), atol=1e-5)
    nodes = [node for node in trace.graph.nodes() if node.kind() == OPERATOR]
    if use == "shape of another":
        assert not nodes
        return
    assert nodes
    for node in nodes:
        assert find_opaque_ref_by_py_id(model, next(node.inputs()).toIValue()) is model.weight


def test_values_that_forward_asks_for_are_traced_by_the_same_operator():
    model = Uses(packed(), lambda x, w, b: x + w.to_base_tensor().sum() + w.to_trace_tensor("cpu").sum())
    trace = traced(model, torch.ones(1))
    ids = [next(node.inputs()).toIValue() for node in trace.graph.nodes() if node.kind() == OPERATOR]
    assert ids == [id(model.weight)] * 2


def test_an_id_that_no_traced_weight_has_is_refused():
    with pytest.raises(ConfigError, match="no opaque tensor with id 7"):
        torch.ops.t2n_hf.opaque_tensor_expand(7)


def branch(x, w, b):
    return x if w.view(-1).argmax() > 3 else -x


READS = {
    "branching on argmax": branch,
    "item": lambda x, w, b: x * w[0, 0].item(),
    "bool": lambda x, w, b: x if bool(w.reshape(-1)[0]) else -x,
    "tolist": lambda x, w, b: x + w.t()[0].tolist()[0],
    "int": lambda x, w, b: x[: int(w.flatten().max())],
    "numpy": lambda x, w, b: x + float(w.T.numpy()[0, 0]),
    "nonzero": lambda x, w, b: x + w.view(-1).nonzero().shape[0],
}


@pytest.mark.parametrize("use", READS)
def test_reading_values_of_a_view_is_refused_while_tracing(use):
    model = Uses(packed(), READS[use])
    model(torch.randn(2, 64))
    set_opaque_tensor_in_params_as_ref(model)
    with pytest.raises(UnsupportedOpError, match=r"reads values of a view of weight \(QTensorTractScaleOnly"):
        traced(model, torch.randn(2, 64))


MIXES = {
    "times a buffer": lambda x, w, b: x[0, 0] + (w.view(-1) * b).sum(),
    "a buffer times it": lambda x, w, b: x[0, 0] + (b * w.view(-1)).sum(),
    "cat": lambda x, w, b: torch.cat([x, w[:2]]),
    "where": lambda x, w, b: torch.where(x > 0, x, w[:2]),
    "after a computation": lambda x, w, b: x + w[:2].abs().neg(),
}


@pytest.mark.parametrize("use", MIXES)
def test_combining_a_view_with_a_real_tensor_is_refused_while_tracing(use):
    model = Uses(packed(), MIXES[use])
    model(torch.randn(2, 64))
    set_opaque_tensor_in_params_as_ref(model)
    with pytest.raises(UnsupportedOpError, match=r"combines a view of weight .*meta device.*on cpu"):
        traced(model, torch.randn(2, 64))


def set_data(ref):
    ref.data = torch.ones(32, 64)


@pytest.mark.parametrize(
    "write",
    [
        lambda ref: ref.mul_(2),
        lambda ref: ref.view(-1).zero_(),
        lambda ref: ref[0].fill_(1),
        lambda ref: ref.__setitem__(0, 1),
        lambda ref: torch.add(torch.ones(32, 64), 1, out=ref),
        lambda ref: torch.add(torch.ones(64, 32), 1, out=ref.t()),
        set_data,
    ],
    ids=["whole", "view", "row", "item", "out", "out of a view", "data"],
)
def test_no_write_to_a_reference_is_lost(write):
    weight = packed()
    weight.name = "layer.weight"
    ref = OpaqueTensorRef(torch.empty(32, 64, device="meta"), weight)
    with pytest.raises(InPlaceError, match=r"layer\.weight"):
        write(ref)


def test_whole_numbers_are_there_to_be_read():
    table = OffloadedTensor.from_original_tensor(torch.tensor([2, 0, 1]), "order")
    ref = OpaqueTensorRef(torch.empty(3, dtype=torch.int64, device="meta"), table)
    assert ref.view(-1)[0].item() == 2
    assert ref.flip(0).tolist() == [1, 0, 2]


def test_a_reference_is_where_its_weight_is():
    ref = OpaqueTensorRef(torch.empty(32, 64, device="meta"), packed())
    assert ref.device.type == "cpu"
    assert not ref.is_meta
    assert ref.T.is_meta


def test_views_that_are_traced_without_values_are_those_that_the_exporter_knows():
    table = overloads_of((*RESHAPES, *TURNS, *EXPANSIONS, *PARTS, *SAME))
    assert [str(op) for op in table if op not in EMITTERS] == []
    # The other way round: what has an emitter, and by its own schema gives views of its first argument.
    views = [op for op in EMITTERS.overloads() if isinstance(op, torch._ops.OpOverload) and _is_view(op)]
    assert len(views) > 20
    others = {"broadcast_tensors", "meshgrid", "linalg_diagonal"}
    of_complex = {"_conj", "conj", "imag", "real", "resolve_conj", "resolve_neg", "view_as_complex", "view_as_real"}
    assert {op.overloadpacket.__name__ for op in views} - VIEW_NAMES - others - of_complex == set()


def _is_view(op):
    schema = op._schema
    if schema.is_mutable or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and alias.before_set != {"*"} and op not in _CONDITIONAL


_CONDITIONAL = overloads_of(["to.dtype", "to.device", "to.dtype_layout", "to.other"])
