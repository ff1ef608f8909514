"""Orders, counts, cumulative and less common functions, and einsum, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

pytestmark = [pytest.mark.tract, pytest.mark.filterwarnings("ignore:torch.searchsorted")]


def ints(*shape: int, low: int = -3, high: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


X, N = floats(2, 5, 4), ints(2, 5, 4)
S = {(0, 1): "S"}


def one(name, function, x=X, **options):
    wide = torch.cat([x, x.flip(1) * 2], 1)
    return Case(name, function, (x,), S, ((wide[:, :9],), (x[:, :1],)), tolerance=1e-5, **options)


def grown(name, function, x=X):
    wide = torch.cat([x, x.flip(1) * 2], 1)
    return Case(name, function, (x,), S, ((wide[:, :9],),), tolerance=1e-5, least=4)


def two(name, function, x=X, y=None):
    y = x.flip(1) + 1 if y is None else y
    others = tuple(torch.cat([v, v * 2], 1)[:, :9] for v in (x, y))
    return Case(name, function, (x, y), {(0, 1): "S", (1, 1): "S"}, (others,), tolerance=1e-5)


BOUNDS = torch.tensor([-1.0, 0.0, 0.5])
ORDERS = [
    one("sort_of_free_length", lambda x: x.sort(1)),
    one(
        "sort_down_of_free_length_keeps_equal_ones_in_order", lambda x: x.sort(dim=1, descending=True, stable=True), x=N
    ),
    one("argsort_of_equal_ones", lambda x: x.argsort(dim=-1, stable=True), x=N),
    one("sort_of_bool", lambda x: (x > 0).sort(dim=-1, stable=True)),
    grown("topk_along_free_length", lambda x: x.topk(3, 1)),
    one("topk_of_a_free_number", lambda x: x.topk(x.shape[1], 1)),
    one("msort", lambda x: torch.msort(x)),
    one("kthvalue", lambda x: x.kthvalue(2, -1)),
    grown("kthvalue_kept", lambda x: x.kthvalue(3, 1, keepdim=True)),
    one("median", lambda x: x.median()),
    one("median_along", lambda x: x.median(1)),
    one("mode", lambda x: x.mode(-1).values, x=N),
    one("argmax_of_number", lambda x: x.sum().argmax(0)),
    one("aminmax", lambda x: x.aminmax(dim=1, keepdim=True)),
    one("aminmax_of_all", lambda x: x.aminmax()),
    one("bucketize_int32", lambda x: torch.bucketize(x, BOUNDS, out_int32=True)),
    one("searchsorted", lambda x: torch.searchsorted(BOUNDS, x)),
    one("searchsorted_right", lambda x: torch.searchsorted(BOUNDS, x.round(), right=True)),
    one("searchsorted_by_row", lambda x: torch.searchsorted(x.sort(-1).values, x[..., :2] * 0.9)),
    one("histc", lambda x: torch.histc(x, 4, -1, 1)),
    one("histc_of_int", lambda x: torch.histc(x.float(), 5, 0, 4).long(), x=ints(2, 5, 4, low=0, high=5)),
    one("isin", lambda x: torch.isin(x, torch.tensor([1, 3])), x=N),
    one("isin_not", lambda x: torch.isin(x, torch.tensor([1, 3]), invert=True), x=N),
    one("isin_number", lambda x: torch.isin(x, 2), x=N),
    one("count_nonzero", lambda x: torch.count_nonzero(x, 1), x=N),
]
CUMULATIVE = [
    one("cumprod", lambda x: x.cumprod(1)),
    one("cumprod_last_of_int", lambda x: x.cumprod(-1), x=N),
    one("cummax", lambda x: x.cummax(1)),
    one("cummax_of_equal_ones", lambda x: x.cummax(1), x=N),
    one("cummin_last", lambda x: x.cummin(-1)),
    one("cummin_of_bool", lambda x: (x > 0).cummin(1).values),
    one("logcumsumexp", lambda x: x.logcumsumexp(1)),
    one("logcumsumexp_far_apart", lambda x: (x * 60).logcumsumexp(-1)),
    one("logcumsumexp_of_nothing", lambda x: torch.where(x > 0, x, float("-inf")).logcumsumexp(1)),
]
STATISTICS = [
    one("var_mean", lambda x: torch.var_mean(x, -1)),
    one("std_mean_kept", lambda x: torch.std_mean(x, (0, 2), keepdim=True)),
    one("var_of_all", lambda x: x.var(unbiased=False)),
    one("var_with_half_a_correction", lambda x: torch.var(x, dim=-1, correction=0.5)),
    one("sum_of_bool_as_bool", lambda x: (x > 0).sum(-1, dtype=torch.bool)),
    one("prod_of_bool", lambda x: (x > -1).prod(-1)),
    one("numbers_of_rank_zero", lambda x: (x.sum().softmax(0), x.sum().logsumexp(0), x.sum().max(0))),
    two("cosine_similarity", lambda x, y: torch.cosine_similarity(x, y, -1)),
    two("cosine_similarity_with_a_number", lambda x, y: torch.cosine_similarity(x, y[:, :, :1] * 2, -1)),
    two("cosine_similarity_of_ranks", lambda x, y: torch.cosine_similarity(x, y.sum(), -1)),
    two("cosine_similarity_of_zeros", lambda x, y: torch.cosine_similarity(x * 0, y, 1)),
    two("cdist", lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")),
    two("cdist_by_product", lambda x, y: torch.cdist(x, y[0] * 3, compute_mode="use_mm_for_euclid_dist")),
    two("cdist_one", lambda x, y: torch.cdist(x, y, 1.0)),
    two("cdist_max", lambda x, y: torch.cdist(x, y, float("inf"))),
]
FUNCTIONS = [
    one("erfinv", lambda x: torch.erfinv(x.tanh())),
    one("erfinv_of_a_number", lambda x: x * torch.erfinv(torch.tensor(0.9))),
    one("ndtri", lambda x: torch.special.ndtri(x.sigmoid())),
    one("lgamma", lambda x: torch.lgamma(x * 5)),
    two("atan2", torch.atan2),
    one("atan2_on_axes", lambda x: torch.atan2(x.round(), x.round().flip(-1)), x=N.float()),
    two("hypot", torch.hypot),
    two("copysign", torch.copysign),
    one("signbit", torch.signbit),
    one("angle", torch.angle),
    one("round_of_f64", lambda x: torch.round(x.double() * 2) + torch.round((x * 4).round().double() / 2)),
    one("round_to_decimals", lambda x: x.round(decimals=2)),
    one("round_to_hundreds", lambda x: (x * 1000).round(decimals=-2)),
    one("nan_to_num", lambda x: torch.nan_to_num(torch.where(x > 0, x.sqrt(), float("inf") * x), 1.0, 7.0, -7.0)),
    one("nan_as_a_number", lambda x: torch.where(x > 0, x, float("nan"))),
    one("left_shift", lambda x: x << 3, x=N),
    one("left_shift_of_number", lambda x: 2 << (x + 3), x=N),
    one("right_shift", lambda x: (x * 7) >> 2, x=N),
    two("right_shift_by_tensor", lambda x, y: (x * 9) >> y, x=N, y=ints(2, 5, 4, low=0, high=5)),
    one("square_of_bool", lambda x: torch.square(x > 0)),
    one("clamp_of_bool", lambda x: torch.clamp_min(x > 0, x < -1)),
    one("sign_of_bool", lambda x: torch.sign(x > 0)),
    one("add_of_bools_times_nothing", lambda x: torch.add(x > 0, x < 1, alpha=False)),
    one("roll_of_all", lambda x: x.roll(3)),
    one("meshgrid_of_number", lambda x: torch.meshgrid(x.sum(), x[0, :, 0], indexing="ij")),
    one("broadcast_of_number", lambda x: torch.broadcast_tensors(x, torch.tensor(2.0))),
]
EINSUMS = [
    two("einsum_ellipsis", lambda x, y: torch.einsum("...sd,...td->...st", x, y)),
    two("einsum_ellipsis_of_two_widths", lambda x, y: torch.einsum("...d,bsd->...s", x[0], y)),
    two("einsum_without_arrow", lambda x, y: torch.einsum("bsd,bsd", x, y)),
    two("einsum_hidden_output", lambda x, y: torch.einsum("b...d,b...d->...", x, y)),
    one("einsum_sum", lambda x: torch.einsum("bsd->d", x)),
    one("einsum_turn", lambda x: torch.einsum("bsd->dbs", x)),
    one("einsum_diagonal", lambda x: torch.einsum("bss->bs", x @ x.mT)),
    one("einsum_trace", lambda x: torch.einsum("...ii", x @ x.mT)),
    two("einsum_broadcast", lambda x, y: torch.einsum("bsd,bsd->bs", x, y[:, :, :1])),
    two("einsum_axis_of_one_operand", lambda x, y: torch.einsum("bsd,bte->bt", x, y)),
    two("einsum_of_three", lambda x, y: torch.einsum("bsd,btd,bd->bst", x, y, x[:, 0])),
    two("einsum_of_int", lambda x, y: torch.einsum("bsd,btd->bst", x, y), x=N),
    two("einsum_elementwise", lambda x, y: torch.einsum("bsd,bsd->bsd", x, y)),
    two("tensordot_of_a_single_element", lambda x, y: torch.tensordot(x[:, :, :1], y, dims=([0, 2], [0, 2]))),
    two("tensordot", lambda x, y: torch.tensordot(x, y, dims=([0, 2], [0, 2]))),
    one("safe_softmax", lambda x: torch.ops.aten._safe_softmax(torch.where(x > 0.5, x, float("-inf")), -1)),
    two("addbmm", lambda x, y: torch.addbmm(x[0] @ x[0].mT, x, y.mT, beta=0.5, alpha=2)),
]
CASES = ORDERS + CUMULATIVE + STATISTICS + FUNCTIONS + EINSUMS


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("order"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
