import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from t2n_hf.trace.quick_results import quick_result

aten = torch.ops.aten
DYNAMIC, STATIC = DimDynamic.DYNAMIC, DimDynamic.STATIC
ONE_TENSOR = ["rsqrt", "neg", "cos", "sin", "tanh", "sigmoid", "silu", "gelu", "relu", "exp"]


@pytest.fixture
def fake():
    """Makes stand-ins; a length of 7 is free, and one symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    free = mode.from_tensor(torch.zeros(7), symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DYNAMIC])).shape[0]

    def make(*shape, dtype=torch.float32):
        with mode:
            return torch.empty([free if length == 7 else length for length in shape], dtype=dtype)

    return make


def shown(tensor):
    return str(tensor.shape), str(tensor.stride()), tensor.dtype, tensor.device, type(tensor)


def agrees(func, *args):
    """Whether there is a quick result, which then is what torch gives."""
    quick = quick_result(func, args, {})
    if quick is not None:
        assert shown(quick) == shown(func(*args))
    return quick is not None


@pytest.mark.parametrize("shape", [(7, 64), (1, 7, 64), (2, 7, 3, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_linear_layer_gives_what_torch_gives(fake, shape, bias):
    weights = [fake(32, 64), *([fake(32)] if bias else [])]
    assert agrees(aten.linear.default, fake(*shape), *weights)
    if len(shape) == 4:
        assert agrees(aten.linear.default, fake(*shape).transpose(1, 2), *weights)


def test_operators_on_one_tensor_give_what_torch_gives(fake):
    for name in ONE_TENSOR:
        func = getattr(aten, name).default
        assert agrees(func, fake(2, 7, 4))
        assert not agrees(func, fake(2, 7, 4).transpose(1, 2))
        assert quick_result(func, (fake(2, 7, 4, dtype=torch.int64),), {}) is None
    assert agrees(aten.pow.Tensor_Scalar, fake(1, 7, 4), 2)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_operators_on_two_tensors_give_what_torch_gives(fake, name):
    func = getattr(aten, name).Tensor
    shapes = [(1, 7, 4), (2, 7, 4), (7, 4), (4,), (1,), (), (2, 1, 4), (1, 7, 1), (2, 7, 1), (1, 1, 7)]
    count = 0
    for one, other in itertools.product(shapes, shapes):
        x, y = fake(*one), fake(*other)
        try:
            wanted = shown(func(x, y))
        except RuntimeError:
            assert quick_result(func, (x, y), {}) is None  # of shapes that do not fit, too
            continue
        quick = quick_result(func, (x, y), {})
        count += quick is not None
        assert quick is None or shown(quick) == wanted
    assert count >= 20
    assert agrees(func, fake(1, 7, 4), 2)
    assert agrees(func, fake(1, 7, 4, dtype=torch.float16), 2.5)


def test_what_would_be_another_dtype_is_left_to_torch(fake):
    assert quick_result(aten.mul.Tensor, (fake(7, 4), fake(7, 4, dtype=torch.float16)), {}) is None
    assert quick_result(aten.div.Tensor, (fake(7, 4, dtype=torch.int64), 2), {}) is None
    assert quick_result(aten.mul.Tensor, (fake(7, 4), True), {}) is None
    assert quick_result(aten.linear.default, (fake(7, 4), fake(8, 4, dtype=torch.float16)), {}) is None


def test_lengths_that_are_equal_at_some_sizes_only_are_left_to_torch(fake):
    environment = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    free = StatelessSymbolicContext(dynamic_sizes=[DYNAMIC, STATIC])
    x, y = (environment.from_tensor(torch.zeros(7, 4), symbolic_context=free) for _ in range(2))
    assert str(x.shape) != str(y.shape)
    assert quick_result(aten.add.Tensor, (x, y), {}) is None
    assert quick_result(aten.linear.default, (x, y.t()), {}) is None
    assert quick_result(aten.linear.default, (fake(7, 4), fake(8, 5)), {}) is None


@pytest.mark.parametrize("weights", [0, 1, 2])
def test_a_layer_norm_gives_what_torch_gives(fake, weights):
    assert agrees(aten.layer_norm.default, fake(2, 7, 4), [4], *[fake(4)] * weights)
    assert quick_result(aten.layer_norm.default, (fake(2, 7, 4), [5]), {}) is None


@pytest.mark.parametrize(
    ("old", "new", "quick"),
    [
        ((1, 7, 64), (1, "S", -1, 16), True),
        ((1, 7, 64), (1, "S", 4, 16), True),
        ((1, 7, 64), (-1, 64), True),
        ((1, 7, 64), (-1, 16), True),
        ((1, 7, 4, 16), (1, "S", -1), True),
        ((1, 7, 64), (7, 64), False),
        ((2, 7, 7), (2, -1), False),
        ((7, 3), (-1, 2), False),
        ((7, 4), (2, "S", 2), True),
        ((7, 4), ("S", 5), False),
        ((4, 6), (-1,), True),
        ((), (1, 1), True),
    ],
    ids=str,
)
def test_a_view_is_what_torch_gives(fake, old, new, quick):
    x = fake(*old)
    free = next((length for length in x.shape if isinstance(length, torch.SymInt)), None)
    shape = [free if length == "S" else length for length in new]
    for func in (aten.view.default, aten.reshape.default):
        if quick:
            assert agrees(func, x, shape)
            seen = quick_result(func, (x, shape), {})
            assert seen.untyped_storage()._cdata == x.untyped_storage()._cdata
        else:
            assert quick_result(func, (x, shape), {}) is None
    if len(old) > 1:
        assert quick_result(aten.view.default, (x.transpose(0, -1), [-1]), {}) is None


@pytest.mark.parametrize("turned", [False, True])
def test_axes_are_added_and_swapped_as_torch_does(fake, turned):
    x = fake(2, 7, 4, dtype=torch.int64)
    x = x.transpose(0, 2) if turned else x
    for axis in range(-4, 4):
        assert agrees(aten.unsqueeze.default, x, axis)
    for one, other in itertools.product(range(-3, 3), range(-3, 3)):
        assert agrees(aten.transpose.int, x, one, other)
    assert quick_result(aten.unsqueeze.default, (x, 4), {}) is None
    assert quick_result(aten.transpose.int, (x, 0, 3), {}) is None
    assert agrees(aten.unsqueeze.default, fake(), 0)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_tensors_are_joined_as_torch_does(fake, axis):
    x = fake(2, 7, 3, 4)
    assert agrees(aten.cat.default, [x, x], axis)
    assert agrees(aten.cat.default, [x.transpose(1, 2), x.transpose(1, 2), fake(2, 3, 7, 4)], axis)
    assert not agrees(aten.cat.default, [x.transpose(1, 3), x.transpose(1, 3)], axis)
    if axis % 4 != 2:
        assert quick_result(aten.cat.default, ([x, fake(2, 7, 5, 4)], axis), {}) is None
    else:
        assert agrees(aten.cat.default, [x, fake(2, 7, 5, 4)], axis)
    assert quick_result(aten.cat.default, ([x, fake(7, 4)], axis), {}) is None


def test_a_mean_is_what_torch_gives(fake):
    assert agrees(aten.mean.dim, fake(2, 7, 4), [-1], True)
    assert agrees(aten.mean.dim, fake(2, 7, 4), [2], True)
    assert quick_result(aten.mean.dim, (fake(2, 7, 4), [-1]), {}) is None
    assert quick_result(aten.mean.dim, (fake(2, 7, 4), [1], True), {}) is None
    assert quick_result(aten.mean.dim, (fake(2, 7, 4, dtype=torch.int64), [2], True), {}) is None


def test_options_are_left_to_torch(fake):
    assert quick_result(aten.add.Tensor, (fake(7, 4), fake(7, 4)), {"alpha": 2}) is None


def test_what_torch_refuses_is_left_to_it(fake):
    assert quick_result(aten.cat.default, ([],), {}) is None
    assert quick_result(aten.mean.dim, (fake(), [-1], True), {}) is None
    assert quick_result(aten.mean.dim, (fake(2, 4), [3], True), {}) is None
