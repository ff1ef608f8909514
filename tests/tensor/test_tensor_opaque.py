"""Opaque tensors act as the tensors that they stand for, and lose no write."""

import copy
import pickle  # noqa: TID251 - to show that it refuses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from t2n_hf.errors import ConfigError, InPlaceError, UnsupportedOpError
from t2n_hf.tensor.compute import compute_mode, overriding_compute
from t2n_hf.tensor.fallback import ReadOnlyView
from t2n_hf.tensor.opaque import OpaqueTensor, materialised_counts, opaque_to_final_tensor


class Half(OpaqueTensor):
    """Keeps f16 values; has no rule of its own."""

    @classmethod
    def of(cls, values, dtype=torch.float32, name="layer.weight"):
        result = cls._shell(values.shape, dtype, values.device, name)
        result.values_f16 = values
        return result

    def _to_base_tensor(self):
        return self.values_f16.to(self.dtype)

    def _parts(self):
        return {"values_f16": self.values_f16}

    def _rebuild(self, parts, dtype):
        return self.of(parts["values_f16"], dtype, self.name)


class Wrapped(OpaqueTensor):
    """An opaque tensor over an opaque tensor."""

    @classmethod
    def of(cls, inner):
        result = cls._shell(inner.shape, inner.dtype, inner.device)
        result.wrapped = inner
        return result

    def _to_base_tensor(self):
        return self.wrapped

    def _parts(self):
        return {"wrapped": self.wrapped}

    def _rebuild(self, parts, dtype):
        return self.of(parts["wrapped"])


@pytest.fixture
def values():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).half()


@pytest.fixture
def weight(values):
    return nn.Parameter(Half.of(values), requires_grad=False)


def counted(run):
    """What `materialise` did while `run` ran."""
    before = materialised_counts()
    run()
    return {key: n - before.get(key, 0) for key, n in materialised_counts().items() if n != before.get(key, 0)}


def test_it_looks_like_the_tensor_that_it_stands_for(weight, values):
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device, weight.ndim) == ((6, 8), torch.float32, values.device, 2)
    assert (weight.numel(), weight.nbytes, weight.opaque_nbytes) == (48, 192, 96)
    assert weight.size(1) == 8
    assert weight.stride() == (8, 1)
    assert weight.is_contiguous()
    assert weight.is_leaf
    assert not weight.requires_grad
    assert repr(weight) == "Half(shape=(6, 8), dtype=torch.float32, device='cpu', name='layer.weight', 96 bytes)"


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ w.T,
        lambda w, x: torch.matmul(x, w.transpose(0, 1)),
        lambda w, x: torch.einsum("bk,nk->bn", x, w),
        lambda w, x: F.linear(x, w, torch.ones(6)),
        lambda w, x: torch.addmm(torch.ones(6), x, w.t()),
        lambda w, x: w * 2 + 1,
        lambda w, x: torch.cat([w, w]),
        lambda w, x: w.view(-1),
        lambda w, x: w.reshape(4, 12),
        lambda w, x: w.chunk(2)[1],
        lambda w, x: w[1:3, ::2],
        lambda w, x: w[None],
        lambda w, x: w[torch.tensor([True, False] * 3)],
        lambda w, x: w.norm(),
        lambda w, x: w.to(torch.int32),
        lambda w, x: torch.zeros(6, 8).copy_(w),
        lambda w, x: torch.zeros_like(w),
        lambda w, x: w.new_ones(3),
        lambda w, x: F.embedding(torch.tensor([[1, 2]]), w),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_functions_give_what_they_give_for_the_values(weight, values, function, mode):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    with mode():
        found, expected = function(weight, x), function(values.float(), x)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert bool(torch.equal(found.clone(), expected))


def test_values_leave_as_lists_and_arrays(weight, values):
    assert weight.tolist() == values.tolist()
    np.testing.assert_array_equal(weight.numpy(), values.float().numpy())
    assert float(weight[0, 0]) == float(values[0, 0])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_what_needs_no_values_makes_none(weight, mode):
    def run():
        with mode():
            for result in (weight.detach(), weight.clone(), weight.to(torch.bfloat16), weight.half(), weight.data):
                assert type(result) is Half
                assert result.name == "layer.weight"
            copy.copy(weight), copy.deepcopy(weight), weight.to("meta"), weight.contiguous(), weight.cpu()
            torch.empty_like(weight), torch.zeros_like(weight), weight.new_empty(2), weight.is_pinned()
            assert torch.equal(weight, weight.clone())

    assert counted(run) == {}


def test_every_dense_fallback_is_counted(weight):
    counts = counted(lambda: (weight + 1, F.linear(torch.ones(1, 8), weight)))
    assert counts == {("Half", "aten.add.Tensor"): 1, ("Half", "linear"): 1}


def test_clones_have_their_own_memory_and_aliases_share_it(weight, values):
    assert weight.detach().values_f16 is values
    assert weight.to(torch.bfloat16).values_f16 is values
    assert copy.copy(weight).values_f16 is values
    for own in (weight.clone(), copy.deepcopy(weight), weight.to(torch.float32, copy=True)):
        assert own.values_f16.data_ptr() != values.data_ptr()
        assert torch.equal(own, weight)
    assert weight.to(torch.float32) is weight


def test_deepcopy_keeps_the_parameter_and_ties(weight):
    module = nn.ModuleList([nn.Linear(8, 6), nn.Linear(8, 6)])
    module[0].weight = module[1].weight = weight
    twin = copy.deepcopy(module)
    assert twin[0].weight is twin[1].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.name == "layer.weight"


def test_equal_compares_values_across_classes(weight, values):
    assert torch.equal(weight, values.float())
    assert not torch.equal(weight, values.float() + 1)
    assert torch.equal(weight, Wrapped.of(Half.of(values)))


def test_nested_tensors_expand_to_plain_values(values):
    nested = Wrapped.of(Wrapped.of(Half.of(values)))
    assert type(opaque_to_final_tensor(nested)) is torch.Tensor
    assert torch.equal(opaque_to_final_tensor(nested), values.float())
    assert nested.opaque_nbytes == values.nbytes
    plain = torch.ones(2)
    assert opaque_to_final_tensor(plain) is plain


def test_a_trace_tensor_has_values_only_where_they_are_asked_for(weight, values):
    assert counted(lambda: weight.to_trace_tensor("meta")) == {}
    assert weight.to_trace_tensor("meta").device.type == "meta"
    assert torch.equal(weight.to_trace_tensor("cpu"), values.float())


def test_a_module_is_cast_and_moved_with_its_weight(weight):
    layer = nn.Linear(8, 6)
    layer.weight = copy.deepcopy(weight)
    layer.to(torch.bfloat16)
    assert (type(layer.weight), layer.weight.dtype, layer.bias.dtype) == (Half, torch.bfloat16, torch.bfloat16)
    assert isinstance(layer.weight, nn.Parameter)
    layer.to("meta")
    assert layer.weight.values_f16.device.type == "meta"


@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "copied"])
def test_a_state_dict_loads_into_the_same_class(weight, assign):
    source, target = nn.Linear(8, 6), nn.Linear(8, 6)
    source.weight = weight
    target.weight = nn.Parameter(Half.of(torch.zeros(6, 8).half(), name="target"), requires_grad=False)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert type(target.weight) is Half
    assert torch.equal(target.weight, weight)


def test_data_takes_the_same_class_or_plain_values_which_replace_it(weight, values):
    weight.data = Half.of(values * 2)
    assert torch.equal(weight, (values * 2).float())
    assert weight.name == "layer.weight"
    weight.data = weight.data.to(torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert isinstance(weight, nn.Parameter)
    module = nn.Linear(8, 6)
    module.weight = weight
    weight.data = torch.ones(3, 8)
    assert module.weight is weight
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight, torch.ones(3, 8))


def _set(tensor, index):
    tensor[index] = 0


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.copy_(torch.zeros(6, 8)),
        lambda w: w.data.add_(1),
        lambda w: w.detach().zero_(),
        lambda w: nn.init.kaiming_uniform_(w),
        lambda w: torch.add(torch.ones(6, 8), 1, out=w),
        lambda w: torch._foreach_add_([torch.ones(6, 8), w], 1),
        lambda w: _set(w, 0),
        lambda w: _set(w, (slice(None), 1)),
        lambda w: w[0].fill_(0),
        lambda w: _set(w[0], 1),
        lambda w: w[1:3][0].add_(1),
        lambda w: w.view(-1).zero_(),
        lambda w: w.T[0].zero_(),
        lambda w: w.chunk(2)[0].mul_(0),
        lambda w: w.unbind()[1].sub_(1),
        lambda w: w.diagonal().fill_(1),
        lambda w: torch.ops.aten.mul_.Scalar(w.view(-1), 2.0),
        lambda w: w.view(-1).__iadd__(1),
        lambda w: torch.add(torch.ones(48), 1, out=w.view(-1)),
        lambda w: setattr(w.view(-1), "data", torch.zeros(48)),
        lambda w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
        lambda w: w.resize_(2, 2),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_no_write_is_lost_silently(weight, values, write, mode):
    with mode(), pytest.raises(InPlaceError, match=r"layer\.weight"):
        write(weight)
    assert torch.equal(weight, values.float())


def test_views_compute_like_plain_tensors_and_copies_can_be_written(weight, values):
    row = weight[0]
    assert type(row) is ReadOnlyView
    assert type(row + 1) is torch.Tensor
    assert row.shape == torch.Size([8])
    assert torch.equal(row.clone().mul_(2), values[0].float() * 2)
    assert type(weight[torch.tensor([0, 1])].add_(1)) is torch.Tensor
    np.testing.assert_array_equal(row.numpy(), values[0].float().numpy())
    assert repr(row)


def test_requires_grad_can_be_set_and_gradients_reach_inputs(weight, values):
    x = torch.ones(2, 8, requires_grad=True)
    F.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, values.float().sum(0).expand(2, 8))
    trainable = Half.of(values).requires_grad_()
    F.linear(x.detach(), trainable).sum().backward()
    torch.testing.assert_close(trainable.grad, torch.full((6, 8), 2.0))


def test_gradients_pass_double_use_and_no_bias(weight, values):
    x = torch.randn(3, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    dense = values.float()
    (F.linear(x, weight) @ weight).sum().backward()
    (F.linear(y, dense) @ dense).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_gradients_of_gradients_and_transforms_of_functions_pass_through(weight, values):
    dense, bias = values.float(), torch.randn(6)
    x = torch.randn(3, 8, requires_grad=True)
    found = []
    for w in (weight, dense):
        (first,) = torch.autograd.grad(F.linear(x, w, bias).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), x)[0])
    torch.testing.assert_close(*found)
    jacobian = torch.func.jacrev(lambda row: F.linear(row, weight, bias))(torch.randn(8))
    torch.testing.assert_close(jacobian, dense)
    mapped = torch.vmap(lambda row: F.linear(row, weight, bias))(x.detach())
    torch.testing.assert_close(mapped, F.linear(x.detach(), dense, bias))
    grads = torch.vmap(torch.func.grad(lambda row: F.linear(row, weight, bias).pow(2).sum()))(x.detach())
    torch.testing.assert_close(grads, 2 * F.linear(x.detach(), dense, bias) @ dense)


def test_the_constructor_makes_parameters_of_its_own_class_and_of_values_that_are_put_in_its_place(weight):
    again = type(weight)(weight, requires_grad=False)
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again, weight)
    with pytest.raises(ConfigError, match="got Tensor; make one with quantize"):
        Half(torch.zeros(2, 2))
    dense = Half(torch.zeros(2, 2), requires_grad=False)
    assert type(dense) is nn.Parameter
    assert not dense.requires_grad


def test_it_is_not_pickled(weight):
    with pytest.raises(UnsupportedOpError, match=r"layer\.weight .* is not pickled"):
        pickle.dumps(weight)


def test_a_class_that_does_not_say_its_values_is_told_what_to_define():
    class Empty(OpaqueTensor):
        pass

    with pytest.raises(UnsupportedOpError, match=r"Empty .* define _to_base_tensor"):
        Empty._shell((2,), torch.float32, "cpu").to_base_tensor()


def test_fake_tensor_mode_keeps_the_class_and_computes_shapes(weight):
    mode = FakeTensorMode()
    fake = mode.from_tensor(weight)
    with mode:
        assert type(fake) is Half
        assert F.linear(torch.empty(3, 8), fake).shape == (3, 6)
        assert (fake + 1).shape == (6, 8)


def test_flattening_and_unflattening_round_trips(weight):
    names, context = weight.__tensor_flatten__()
    twin = Half.__tensor_unflatten__({n: getattr(weight, n) for n in names}, context, weight.shape, weight.stride())
    assert torch.equal(twin, weight)
    assert context == weight.detach().__tensor_flatten__()[1]
    assert context != weight.to(torch.bfloat16).__tensor_flatten__()[1]
    assert hash(context) == hash(weight.__tensor_flatten__()[1])


def test_compute_mode_nests_and_ends():
    assert overriding_compute() is None
    with compute_mode("fast"):
        with compute_mode("exact"):
            assert overriding_compute() == "exact"
        assert overriding_compute() == "fast"
    assert overriding_compute() is None
    with pytest.raises(ConfigError, match="'quick'; expected one of exact, fast"), compute_mode("quick"):
        pass


def test_sharing_memory_moves_the_parts():
    tensor = Half.of(torch.randn(4, 8).half())
    expected = tensor.to_base_tensor()
    assert tensor.share_memory_() is tensor
    assert tensor.values_f16.is_shared()
    assert torch.equal(tensor.to_base_tensor(), expected)


def test_numpy_takes_the_values():
    tensor = Half.of(torch.randn(4, 8).half())
    np.testing.assert_array_equal(np.asarray(tensor), tensor.to_base_tensor().numpy())
