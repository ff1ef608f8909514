import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from t2n_hf.errors import CaptureError
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.fallback import materialised_counts
from t2n_hf.trace import DispatchTracer, PythonTensor

aten = torch.ops.aten


@pytest.fixture
def tracer():
    return DispatchTracer()


def wrapped(tracer, tensor, name="x", **options):
    return PythonTensor(tensor, tracer.create_proxy("placeholder", name, (), {}), **options)


def test_its_own_attributes_are_the_proxy_and_whether_it_is_immutable(tracer):
    assert PythonTensor.__slots__ == ["proxy", "is_immutable"]
    x = wrapped(tracer, torch.ones(2), is_immutable=True)
    assert isinstance(x, torch.Tensor)
    assert isinstance(x.proxy, fx.Proxy)
    assert x.is_immutable
    assert not wrapped(tracer, torch.ones(2), "y").is_immutable


def test_an_operator_gives_the_value_and_a_proxy_of_its_own_node(tracer):
    x = wrapped(tracer, torch.tensor([1.0, 2.0]))
    y = x + 1
    assert isinstance(y, PythonTensor)
    assert y.tolist() == [2.0, 3.0]
    assert (y.proxy.node.target, y.proxy.node.args) == (aten.add.Tensor, (x.proxy.node, 1))


def test_a_proxy_can_be_replaced(tracer):
    x, y = wrapped(tracer, torch.ones(2)), wrapped(tracer, torch.ones(2), "y")
    x.update_proxy(y.proxy)
    assert (x * 2).proxy.node.args[0] is y.proxy.node


def test_its_repr_shows_what_is_wrapped_and_records_nothing(tracer):
    x = wrapped(tracer, torch.tensor([1.0, 2.0]))
    assert repr(x) == "PythonTensor(tensor([1., 2.]))"
    assert len(tracer.graph.nodes) == 1


def test_wrapping_detaches_and_gives_a_leaf_that_requires_grad(tracer):
    weight = nn.Parameter(torch.ones(2))
    product = wrapped(tracer, weight * 3)
    assert product.requires_grad
    assert product.is_leaf
    assert product.grad_fn is None
    assert not product.elem.requires_grad
    assert isinstance(wrapped(tracer, weight, "w"), nn.Parameter)
    assert not isinstance(product, nn.Parameter)


def test_gradients_flow_through_the_wrapper_and_are_recorded(tracer):
    x = wrapped(tracer, torch.tensor([1.0, 2.0], requires_grad=True))
    (gradient,) = torch.autograd.grad((x * x).sum(), x)
    assert isinstance(gradient, PythonTensor)
    assert gradient.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.zero_(),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.copy_(torch.ones(2)),
    ],
    ids=["add_", "zero_", "out", "copy_"],
)
def test_in_place_and_out_variants_update_the_proxy_and_give_the_same_object(tracer, change):
    x = wrapped(tracer, torch.zeros(2))
    before = x.proxy.node
    with torch.no_grad():
        result = change(x)
    assert result is x
    assert x.proxy.node is not before
    assert x.proxy.node.op == "call_function"
    assert (x * 1).proxy.node.args[0] is x.proxy.node


def test_an_immutable_tensor_is_refused_as_an_out_argument(tracer):
    x, y = wrapped(tracer, torch.ones(2), is_immutable=True), wrapped(tracer, torch.ones(2), "y")
    with pytest.raises(CaptureError, match=r"into 'out', an immutable tensor of shape \(2,\)"):
        torch.add(y, y, out=x)
    assert torch.add(x, x, out=y) is y


@pytest.mark.parametrize("turn", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(3, 5)])
def test_the_wrapper_has_the_shape_that_an_operator_gave_it_in_place(tracer, turn):
    x, plain = wrapped(tracer, torch.ones(2, 3)), torch.ones(2, 3)
    assert turn(x).shape == turn(plain).shape == x.shape == x.elem.shape
    assert x.stride() == plain.stride()


def test_an_out_argument_grows_to_the_shape_of_the_result(tracer):
    x, out = wrapped(tracer, torch.ones(2, 3)), wrapped(tracer, torch.empty(0), "out")
    torch.mul(x, 2, out=out)
    assert out.shape == (2, 3)
    assert out.tolist() == [[2.0] * 3] * 2


def test_linear_and_layer_norm_are_kept_whole_under_inference_mode(tracer):
    with torch.inference_mode():
        x, weight = wrapped(tracer, torch.randn(2, 4)), wrapped(tracer, torch.randn(3, 4), "w")
        y = F.linear(x, weight)
        z = F.layer_norm(y, (3,), weight=None, bias=None, eps=1e-6)
    assert y.proxy.node.target is aten.linear.default
    assert y.proxy.node.args == (x.proxy.node, weight.proxy.node)
    assert z.proxy.node.target is aten.layer_norm.default
    assert z.proxy.node.args[:2] == (y.proxy.node, [3])
    assert torch.equal(z.elem, F.layer_norm(F.linear(x.elem, weight.elem), (3,), eps=1e-6))


def test_linear_and_layer_norm_are_taken_apart_otherwise(tracer):
    x, weight = wrapped(tracer, torch.randn(2, 4)), wrapped(tracer, torch.randn(3, 4), "w")
    assert F.linear(x, weight).proxy.node.target is not aten.linear.default
    assert F.layer_norm(x, (4,)).proxy.node.target is not aten.layer_norm.default


def test_a_fake_tensor_stays_fake(tracer):
    with FakeTensorMode() as mode:
        fake = torch.empty(2, 3)
    x = wrapped(tracer, fake)
    y = x @ x.T
    assert isinstance(y.elem, FakeTensor)
    assert y.elem.fake_mode is mode
    assert y.shape == (2, 2)


def test_an_opaque_tensor_is_never_made_dense(tracer):
    weight = QTensorTractScaleOnly.quantize(torch.randn(4, 32))
    before = materialised_counts()
    w = wrapped(tracer, weight, "w")
    x = wrapped(tracer, torch.randn(2, 32))
    assert (w.shape, w.dtype, w.device) == (weight.shape, weight.dtype, weight.device)
    y = F.linear(x, w) + w.T[:1]
    assert y.shape == (2, 4)
    assert w.elem is weight
    assert materialised_counts() == before
    with pytest.raises(CaptureError, match="needs the values of a tensor that has only a shape"):
        float(y.sum())
    with pytest.raises(CaptureError, match=r"tolist\(\) needs the values"):
        y.tolist()
    assert materialised_counts() == before


def test_sparse_tensors_are_refused(tracer):
    with pytest.raises(CaptureError, match=r"another layout \(torch.sparse_coo\)"):
        wrapped(tracer, torch.eye(2).to_sparse())


def test_tensors_of_two_traces_do_not_mix(tracer):
    x, y = wrapped(tracer, torch.ones(2)), wrapped(DispatchTracer(), torch.ones(2))
    with pytest.raises(CaptureError, match="belongs to another trace"):
        x + y


def test_a_proxy_of_any_other_tracer_is_refused():
    graph = fx.Graph()
    proxy = fx.Proxy(graph.placeholder("x"))
    with pytest.raises(CaptureError, match="GraphAppendingTracer; PythonTensors record with a DispatchTracer"):
        PythonTensor(torch.ones(2), proxy) + 1


@pytest.mark.parametrize("bit", [torch.conj, torch.imag], ids=["conj", "neg"])
def test_lazy_conjugates_and_negatives_keep_their_bit(tracer, bit):
    plain = torch.tensor([1 + 2j, 3 - 1j])
    x = bit(wrapped(tracer, plain).conj())
    expected = bit(plain.conj())
    assert (x.is_conj(), x.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert torch.equal((x * 2).elem, expected * 2)


def test_data_that_is_replaced_is_that_of_the_other_tensor(tracer):
    x, y = wrapped(tracer, torch.zeros(2)), wrapped(tracer, torch.ones(3), "y")
    x.data = y * 2
    assert x.shape == (3,)
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert x.proxy.node.target is aten.mul.Tensor


def test_a_number_is_formatted_as_one(tracer):
    assert f"expert_{wrapped(tracer, torch.tensor(3))}" == "expert_3"
