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

    def make(*shape, dtype=torch.float32):
        dims = [DYNAMIC if length == 7 else STATIC for length in shape]
        return mode.from_tensor(
            torch.zeros(shape, dtype=dtype), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)
        )

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


def test_options_are_left_to_torch(fake):
    assert quick_result(aten.add.Tensor, (fake(7, 4), fake(7, 4)), {"alpha": 2}) is None
