"""Arithmetic, functions of one number, comparisons, choices and activations, against PyTorch."""

import pytest
import torch
from op_harness import Case, build_and_run, compare
from torch.nn import functional as F

pytestmark = pytest.mark.tract


def floats(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def positives(*shape: int) -> torch.Tensor:
    return floats(*shape).abs() + 0.1


def ints(*shape: int, low: int = -7, high: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def bools(*shape: int, seed: int = 0) -> torch.Tensor:
    return ints(*shape, low=0, high=2, seed=seed).bool()


S = {(0, 1): "S"}
SS = {(0, 1): "S", (1, 1): "S"}
X, Y = floats(2, 5, 3), floats(2, 5, 3, seed=1)
N, M = ints(2, 5, 3), ints(2, 5, 3, low=1, seed=1)
B, C = bools(2, 5, 3), bools(2, 5, 3, seed=1)
LONG = (floats(2, 9, 3),)


def infinite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 1, float("inf"), x)


def unary(name, function, x=X, **options):
    other = x.repeat(1, 2, 1)[:, :9]
    return Case(name, function, (x,), S, ((other,),), **options)


def binary(name, function, x=X, y=Y, **options):
    others = tuple(v.repeat(1, 2, 1)[:, :9] for v in (x, y))
    return Case(name, function, (x, y), SS, (others,), **options)


FLOAT_FUNCTIONS = (
    [
        unary(name, getattr(torch, name), **options)
        for name, options in {
            "neg": {},
            "abs": {},
            "exp": {},
            "sin": {},
            "cos": {},
            "tanh": {"tolerance": 1e-5},
            "sigmoid": {"tolerance": 1e-5},
            "erf": {"tolerance": 1e-5},
            "floor": {},
            "ceil": {},
            "round": {},
            "trunc": {},
            "frac": {},
            "sign": {},
            "square": {},
            "sinh": {},
            "cosh": {},
            "atan": {},
            "asinh": {"tolerance": 1e-5},
            "expm1": {"tolerance": 1e-5},
            "exp2": {"tolerance": 1e-5},
            "erfc": {"tolerance": 1e-5},
            "relu": {},
            "isnan": {},
            "isinf": {},
            "reciprocal": {},
            "tan": {"tolerance": 1e-4},
            "positive": {},
            "selu": {"tolerance": 1e-5},
        }.items()
    ]
    + [
        unary(f"{name}_of_positive", getattr(torch, name), x=positives(2, 5, 3), tolerance=1e-5)
        for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")
    ]
    + [
        unary(f"{name}_of_unit", getattr(torch, name), x=floats(2, 5, 3).tanh() * 0.9, tolerance=1e-5)
        for name in ("asin", "acos", "atanh")
    ]
    + [
        unary("acosh_above_one", torch.acosh, x=positives(2, 5, 3) + 1, tolerance=1e-5),
        unary("log1p_near_zero", torch.log1p, x=X * 1e-5, tolerance=1e-6),
        unary("expm1_near_zero", torch.expm1, x=X * 1e-5, tolerance=1e-6),
        unary("round_half_to_even", torch.round, x=torch.tensor([[[0.5, 1.5, 2.5], [-0.5, -1.5, 3.5]]])),
        unary("abs_of_int", torch.abs, x=N),
        unary("neg_of_int", torch.neg, x=N),
        unary("sign_of_int", torch.sign, x=N),
        unary("floor_of_int", torch.floor, x=N),
        unary("sqrt_of_int", torch.sqrt, x=M),
        unary("exp_of_int", torch.exp, x=N, tolerance=1e-5),
        unary("sigmoid_of_int", torch.sigmoid, x=N, tolerance=1e-5),
    ]
)

ARITHMETIC = [
    binary("add", torch.add),
    binary("sub", torch.sub),
    binary("mul", torch.mul),
    binary("div", torch.div),
    binary("add_alpha", lambda x, y: torch.add(x, y, alpha=0.5)),
    binary("sub_alpha", lambda x, y: torch.sub(x, y, alpha=2)),
    unary("add_int_scalar", lambda x: x + 2),
    unary("add_float_to_int", lambda x: x + 1.5, x=N),
    unary("mul_half_of_int", lambda x: x * 0.5, x=N),
    unary("rsub", lambda x: 3 - x),
    unary("rsub_int", lambda x: 3 - x, x=N),
    unary("add_zero_keeps_dtype", lambda x: x + 0, x=N),
    unary("mul_one", lambda x: x * 1),
    unary("div_by_scalar", lambda x: x / 3, tolerance=1e-5),
    unary("scalar_over", lambda x: 3 / x, tolerance=1e-5),
    binary("int_over_int_is_float", torch.div, x=N, y=M),
    unary("int_over_scalar", lambda x: x / 4, x=N),
    binary("float_times_int", torch.mul, x=X, y=N),
    binary("float_times_bool", torch.mul, x=X, y=B),
    binary("int_times_bool", torch.mul, x=N, y=B),
    binary("bool_times_bool", torch.mul, x=B, y=C),
    binary("bool_plus_bool", torch.add, x=B, y=C),
    binary("bool_plus_int", torch.add, x=B, y=N),
    Case("add_of_lower_rank", torch.add, (X, floats(3)), S, ((LONG[0], floats(3)),)),
    Case("add_of_rank_two", torch.add, (X, floats(5, 3)), {(0, 1): "S", (1, 0): "S"}),
    Case("mul_of_rank_zero", torch.mul, (X, torch.tensor(2.5)), S),
    Case("add_of_rows_and_columns", torch.add, (floats(5, 1), floats(1, 4)), {(0, 0): "S", (1, 1): "T"}),
    binary("floor_divide", torch.floor_divide, x=N, y=M),
    binary("floor_divide_float", torch.floor_divide),
    unary("floor_divide_scalar", lambda x: x // 3, x=N),
    unary("floor_divide_negative", lambda x: x // -3, x=N),
    binary("remainder", torch.remainder, x=N, y=M),
    unary("remainder_negative", lambda x: x % -3, x=N),
    binary("remainder_float", torch.remainder, tolerance=1e-5),
    binary("fmod", torch.fmod, x=N, y=M),
    binary("fmod_float", torch.fmod, tolerance=1e-5),
    binary("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), x=N, y=M),
    binary("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), x=N, y=M),
    binary("div_trunc_float", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    unary("pow_two", lambda x: x**2),
    unary("pow_three", lambda x: x**3),
    unary("pow_four", lambda x: x**4),
    unary("pow_half", lambda x: x**0.5, x=positives(2, 5, 3)),
    unary("pow_minus_half", lambda x: x**-0.5, x=positives(2, 5, 3)),
    unary("pow_fraction", lambda x: x**1.7, x=positives(2, 5, 3), tolerance=1e-5),
    unary("pow_of_int", lambda x: x**2, x=N),
    unary("scalar_pow", lambda x: 2.0**x, tolerance=1e-5),
    binary("pow_tensor", torch.pow, x=positives(2, 5, 3), y=Y, tolerance=1e-5),
    binary("pow_int_exponent", torch.pow, x=positives(2, 5, 3), y=N, tolerance=1e-5),
    unary("int_pow_five", lambda x: x**5, x=N),
    binary("maximum", torch.maximum),
    binary("minimum_int", torch.minimum, x=N, y=M),
    binary("maximum_bool", torch.maximum, x=B, y=C),
    unary("clamp", lambda x: x.clamp(-1, 1)),
    unary("clamp_min", lambda x: x.clamp(min=0.5)),
    unary("clamp_max", lambda x: x.clamp_max(0.5)),
    unary("clamp_of_int", lambda x: x.clamp(-1, 2), x=N),
    unary("clamp_int_by_float", lambda x: x.clamp(-1.5, 2.5), x=N),
    binary("clamp_by_tensor", lambda x, y: torch.clamp(x, min=y)),
    unary("hardtanh", F.hardtanh),
    binary("lerp", lambda x, y: torch.lerp(x, y, 0.3)),
    binary("lerp_from_infinity", lambda x, y: torch.lerp(infinite(x), y, 0.7)),
    binary("lerp_to_infinity", lambda x, y: torch.lerp(x, infinite(y), 0.3)),
    binary("lerp_by_tensor", lambda x, y: torch.lerp(infinite(x), -infinite(y), torch.sigmoid(x))),
    binary("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5)),
    binary("addcdiv", lambda x, y: torch.addcdiv(x, x, y, value=0.5), tolerance=1e-5),
    unary("add_of_length", lambda x: x + x.shape[1]),
    unary("int_add_of_length", lambda x: x + x.shape[1], x=N),
    unary("div_by_length", lambda x: x / x.shape[1]),
    unary("in_place_add", lambda x: (x * 2).add_(1)),
    unary("big_int", lambda x: x + 2**31, x=N),
    unary("f64", lambda x: x.double() * 2),
]

COMPARISONS = (
    [
        binary(f"{name}_{kind}", getattr(torch, name), x=x, y=y)
        for name in ("eq", "ne", "gt", "lt", "ge", "le")
        for kind, x, y in (("float", X, X.round()), ("int", N, M), ("bool", B, C), ("mixed", N, Y.round()))
    ]
    + [
        unary(f"{name}_scalar", lambda x, name=name: getattr(torch, name)(x, 1), x=N)
        for name in ("eq", "ne", "gt", "lt", "ge", "le")
    ]
    + [unary(f"{name}_fraction", lambda x, name=name: getattr(torch, name)(x, 0.5), x=N) for name in ("eq", "gt", "le")]
    + [
        unary("le_of_nan", lambda x: x.sqrt() <= x),
        unary("ge_of_infinity", lambda x: x >= float("-inf")),
        binary("and", lambda x, y: x & y, x=B, y=C),
        binary("or", lambda x, y: x | y, x=B, y=C),
        binary("xor", lambda x, y: x ^ y, x=B, y=C),
        binary("and_int", lambda x, y: x & y, x=M, y=M.flip(1)),
        binary("or_int", lambda x, y: x | y, x=M, y=M.flip(1)),
        unary("and_scalar", lambda x: x & 3, x=M),
        unary("not", lambda x: ~x, x=B),
        unary("not_int", lambda x: ~x, x=N),
        binary("logical_and", torch.logical_and, x=N, y=X),
        binary("logical_or", torch.logical_or, x=N, y=B),
        binary("logical_xor", torch.logical_xor, x=N, y=B),
        unary("logical_not", torch.logical_not, x=N),
        binary("where", lambda x, y: torch.where(x > 0, x, y)),
        binary("where_int", lambda x, y: torch.where(x > 0, x, y), x=N, y=M),
        binary("where_mixed", lambda x, y: torch.where(x > 0, x, y), x=N, y=Y),
        unary("where_scalars", lambda x: torch.where(x > 0, 1.0, -2.0)),
        unary("where_int_scalars", lambda x: torch.where(x > 0, 1, -2)),
        unary("where_scalar_other", lambda x: torch.where(x > 0, x, 0.0)),
        unary("where_scalar_self", lambda x: torch.where(x > 0, 0, x), x=N),
        binary("where_bool", lambda x, y: torch.where(x, y, ~x), x=B, y=C),
        Case("where_lower_rank", lambda m, x: torch.where(m, x, 0.0), (bools(5, 3), X), {(0, 0): "S", (1, 1): "S"}),
        binary("masked_fill", lambda x, y: x.masked_fill(y, -1e9), x=X, y=B),
        binary("masked_fill_int", lambda x, y: x.masked_fill(y, 7), x=N, y=B),
        binary("masked_fill_bool", lambda x, y: x.masked_fill(y, True), x=B, y=C),
        Case(
            "causal_mask_of_ranges",
            lambda x: torch.arange(x.shape[0])[None, :] <= torch.arange(x.shape[0])[:, None],
            (floats(5),),
            {(0, 0): "S"},
            ((floats(1),), (floats(9),)),
        ),
        Case(
            "causal_choice_of_ranges",
            lambda x: torch.where(torch.arange(x.shape[0])[None, :] <= torch.arange(x.shape[0])[:, None], 0.0, -9.0),
            (floats(5),),
            {(0, 0): "S"},
            ((floats(1),), (floats(9),)),
        ),
        Case(
            "band_of_ranges",
            lambda x: (
                (torch.arange(x.shape[0])[None, :] > torch.arange(x.shape[0])[:, None] - 3)
                & (torch.arange(x.shape[0])[None, :] <= torch.arange(x.shape[0])[:, None])
            ),
            (floats(5),),
            {(0, 0): "S"},
            ((floats(1),), (floats(9),)),
        ),
    ]
)

ACTIVATIONS = [
    unary(name, function, tolerance=1e-5)
    for name, function in {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "rrelu": F.rrelu,
        "rrelu_of_bounds": lambda x: F.rrelu(x, 0.1, 0.7),
        "elu": F.elu,
        "elu_alpha": lambda x: F.elu(x, 0.5),
        "celu": lambda x: F.celu(x, 0.7),
        "softplus": F.softplus,
        "softplus_beta": lambda x: F.softplus(x, 2.0, 10.0),
        "logsigmoid": F.logsigmoid,
        "mish": F.mish,
        "hardsigmoid": F.hardsigmoid,
        "hardswish": F.hardswish,
        "relu6": F.relu6,
        "threshold": lambda x: F.threshold(x, 0.5, -1.0),
        "softmax": lambda x: x.softmax(-1),
        "softmax_along_symbol": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "softmax_to_f64": lambda x: F.softmax(x, -1, dtype=torch.float64),
        "glu_of_six": lambda x: F.glu(torch.cat([x, x * 2], -1)),
    }.items()
] + [
    unary("softplus_far", F.softplus, x=X * 60, tolerance=1e-5),
    Case("prelu", F.prelu, (X, floats(5)), tolerance=1e-5),
    Case("softmax_of_masked_row", lambda x: torch.where(x > 100, x, torch.finfo(x.dtype).min).softmax(-1), (X,), S),
]

CASES = FLOAT_FUNCTIONS + ARITHMETIC + COMPARISONS + ACTIVATIONS


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("elementwise"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
