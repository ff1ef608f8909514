"""Shapes, slices, indices, reductions and creation, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare
from torch.nn import functional as F

pytestmark = pytest.mark.tract


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*shape: int, low: int = 0, high: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


X, N = floats(2, 5, 4), ints(2, 5, 4)
S = {(0, 1): "S"}


def one(name, function, x=X, lengths=S, **options):
    """One input; axis 1 is symbolic, and is run at 5, 9 and 1."""
    wide = torch.cat([x, x], 1)
    others = ((wide[:, :9],), (x[:, :1],)) if lengths is S else ()
    return Case(name, function, (x,), lengths, others, **options)


def fixed(name, function, *inputs, **options):
    return Case(name, function, inputs, **options)


def grown(name, function, x=X, **options):
    """As `one`, for functions that need a few elements on the symbolic axis."""
    wide = torch.cat([x, x], 1)
    return Case(name, function, (x,), S, ((wide[:, :9],),), least=4, **options)


def number_put(x):
    sizes = torch.empty(2, dtype=torch.int64)
    sizes[0], sizes[1] = 5, 7
    return x + sizes[1]


SHAPES = [
    one("view", lambda x: x.view(2, -1, 2, 2)),
    one("reshape_join", lambda x: x.reshape(2, -1)),
    one("flatten", lambda x: x.flatten(1)),
    one("flatten_all", lambda x: x.flatten()),
    one("unflatten", lambda x: x.unflatten(2, (2, 2))),
    one("unsqueeze", lambda x: x.unsqueeze(-1)),
    one("unsqueeze_twice", lambda x: x[:, None, :, None]),
    one("squeeze", lambda x: x[:, None].squeeze(1)),
    grown("squeeze_all", lambda x: x[:1, None].squeeze()),
    one("squeeze_dims", lambda x: x[:1, :, None].squeeze((0, 2))),
    one("transpose", lambda x: x.transpose(1, 2)),
    one("permute", lambda x: x.permute(2, 0, 1)),
    one("transpose_then_reshape", lambda x: x.transpose(1, 2).reshape(8, -1)),
    one("movedim", lambda x: x.movedim(0, -1)),
    one("matrix_turned", lambda x: x.mT),
    one("expand", lambda x: x[:, :, :1].expand(-1, -1, 6)),
    one("expand_rank", lambda x: x.expand(3, -1, -1, -1)),
    one("expand_as", lambda x: x[:, :, :1].expand_as(x)),
    one("broadcast_to", lambda x: x[:1].broadcast_to(3, x.shape[1], 4)),
    one("repeat", lambda x: x.repeat(1, 2, 3)),
    one("repeat_rank", lambda x: x.repeat(2, 1, 1, 1)),
    one("tile", lambda x: x.tile(2)),
    one("repeat_bool", lambda x: (x > 0).repeat(1, 2, 1)),
    one("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1)),
    one("repeat_interleave_flat", lambda x: x.repeat_interleave(2)),
    one("repeat_interleave_each", lambda x: x.repeat_interleave(torch.tensor([2, 0, 1, 3]), 2, output_size=6)),
    one("repeat_interleave_each_flat", lambda x: x[0, 0].repeat_interleave(torch.tensor([1, 0, 4, 0]), output_size=5)),
    one("repeat_interleave_by_one_number", lambda x: x.repeat_interleave(torch.tensor([2]), -1, output_size=8)),
    one(
        "repeat_interleave_free",
        lambda x: x.repeat_interleave((x[0, :, 0] > 9).long() + 2, 1, output_size=2 * x.shape[1]),
    ),
    one("places_repeated", lambda x: torch.repeat_interleave(torch.tensor([3, 1, 0, 2]), output_size=6) + x.shape[1]),
    one("cat", lambda x: torch.cat([x, x * 2], 1)),
    one("cat_mixed", lambda x: torch.cat([x, x > 0], -1)),
    one("cat_with_empty", lambda x: torch.cat([torch.zeros(0), x.flatten()], 0)),
    one("stack", lambda x: torch.stack([x, x * 2], 1)),
    one("stack_last", lambda x: torch.stack([x, -x], -1)),
    one("hstack", lambda x: torch.hstack([x, x])),
    one("rope_by_halves", lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1)),
    one("rope_by_pairs", lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)),
    one("meshgrid", lambda x: torch.meshgrid(x[0, :, 0], x[0, 0], indexing="ij")),
    one("meshgrid_xy", lambda x: torch.meshgrid(x[0, :, 0], x[0, 0], indexing="xy")),
    one("broadcast_tensors", lambda x: torch.broadcast_tensors(x[:, :, :1], x[:, :1])),
    one("repeat_kv", lambda x: x[:, None, :, None].expand(2, 1, x.shape[1], 3, 4).reshape(2, 1, x.shape[1] * 3, 4)),
    one("to_int", lambda x: (x * 3).long()),
    one("to_bool", lambda x: x.bool()),
    one("to_double", lambda x: x.double()),
    one("bool_to_float", lambda x: (x > 0).float()),
    one("int_to_i32", lambda x: x.int(), x=N),
    one("type_as", lambda x: (x > 0).type_as(x)),
    one("clone", lambda x: (x * 2).clone().contiguous()),
    one("identity", lambda x: x),
    one("same_twice", lambda x: (x + 1, x + 1)),
    one("input_and_result", lambda x: (x, x * 2)),
    one("dropout", lambda x: F.dropout(x, 0.5, training=False)),
    Case(
        "transpose_of_two_symbols",
        lambda x: x.transpose(0, 1).reshape(x.shape[1], -1),
        (floats(3, 5),),
        {(0, 0): "B", (0, 1): "S"},
        ((floats(2, 9),),),
    ),
]

SLICES = [
    grown("slice_from", lambda x: x[:, 2:]),
    grown("slice_to", lambda x: x[:, :3]),
    grown("slice_last", lambda x: x[:, -1:]),
    grown("slice_last_three", lambda x: x[:, -3:]),
    grown("slice_but_last", lambda x: x[:, :-1]),
    grown("slice_middle", lambda x: x[:, 1:-1]),
    one("slice_past_end", lambda x: x[:, :, :100]),
    grown("slice_step", lambda x: x[:, 1::2]),
    one("slice_static_step", lambda x: x[..., ::2]),
    one("slice_everything", lambda x: x[:, :]),
    one("slice_by_length", lambda x: x[:, : x.shape[1]]),
    one("slice_negative_past_start", lambda x: x[:, :, -7:]),
    one("slice_empty", lambda x: x[:, :, 3:3]),
    one("narrow", lambda x: x.narrow(2, 1, 2)),
    grown("narrow_symbolic", lambda x: x.narrow(1, 1, x.shape[1] - 2)),
    one("select", lambda x: x.select(2, 1)),
    one("select_last", lambda x: x[:, -1]),
    one("select_first", lambda x: x[:, 0]),
    grown("select_second_last", lambda x: x[:, -2]),
    one("split", lambda x: x.split(2, -1)),
    one("split_uneven", lambda x: x.split(3, -1)),
    one("split_sizes", lambda x: x.split([1, 3], -1)),
    one("chunk", lambda x: x.chunk(2, -1)),
    one("chunk_uneven", lambda x: x.chunk(3, -1)),
    one("unbind", lambda x: x.unbind(0)),
    one("tensor_split", lambda x: x.tensor_split(2, -1)),
    grown("diff", lambda x: x.diff(dim=1)),
    one("diff_prepended", lambda x: x.diff(dim=1, prepend=x[:, :1])),
    grown("diff_twice", lambda x: x.diff(n=2, dim=1)),
    one("roll", lambda x: x.roll(1, 1)),
    one("roll_back", lambda x: x.roll(-1, 2)),
    one("roll_two", lambda x: x.roll((1, 2), (0, 2))),
    one("flip", lambda x: x.flip(1)),
    one("flip_two", lambda x: x.flip(0, 2)),
    one("glu", lambda x: F.glu(x, -1), tolerance=1e-5),
    grown("shift_by_concat", lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)),
]

PLACES = torch.tensor([[2, 0, 1], [1, 3, 3]])
INDICES = [
    Case(
        "embedding",
        lambda w, i: F.embedding(i, w),
        (floats(7, 4), ints(2, 5)),
        {(1, 1): "S"},
        ((floats(7, 4), ints(2, 1)),),
    ),
    Case("embedding_i32", lambda w, i: F.embedding(i, w), (floats(7, 4), ints(2, 5).int()), {(1, 1): "S"}),
    one(
        "embedding_of_constant_ids", lambda x: x + F.embedding(torch.tensor([[1, 0, 1, 0]]), X[0]).sum(1, keepdim=True)
    ),
    Case(
        "index_select",
        lambda x, i: x.index_select(1, i),
        (X, torch.tensor([0, 3, 3])),
        S,
        ((torch.cat([X, X], 1), torch.tensor([9, 3, 0])),),
    ),
    one("index_one", lambda x: x[:, :, torch.tensor([0, 2, -1])]),
    Case("index_first", lambda x, i: x[i], (X, torch.tensor([1, 0, -1])), S),
    Case("index_two", lambda x, i, j: x[i, j], (X, torch.tensor([1, 0, -1]), torch.tensor([0, -1, 2])), {}),
    Case("index_two_apart", lambda x, i, j: x[i, :, j], (X, torch.tensor([1, 0, -1]), torch.tensor([0, -1, 2])), S),
    Case("index_two_after", lambda x, i, j: x[:, i, j], (X, torch.tensor([1, 0, -1]), torch.tensor([0, -1, 2])), {}),
    Case("index_broadcast", lambda x, i, j: x[i, j], (X, torch.tensor([[1], [0]]), torch.tensor([0, 4, 2])), {}),
    one("index_last_token", lambda x: x[torch.arange(x.shape[0]), -1]),
    Case("gather", lambda x, i: x.gather(2, i), (X, ints(2, 5, 2, high=4)), {(0, 1): "S", (1, 1): "S"}),
    Case("take_along_dim", lambda x, i: x.take_along_dim(i, 2), (X, ints(2, 5, 2, high=4)), {}),
    Case("scatter", lambda x, i: x.scatter(2, i, x * 2), (X, PLACES.repeat(1, 2)[:, :5, None]), {}),
    Case(
        "scatter_value",
        lambda x, i: torch.zeros_like(x).scatter(2, i, 1.0),
        (X, ints(2, 5, 2, high=4)),
        {(0, 1): "S", (1, 1): "S"},
    ),
    Case("scatter_add", lambda x, i: x.scatter_add(2, i, x), (X, ints(2, 5, 4, high=4)), {}),
    Case("masked_scatter", lambda x, s: x.masked_scatter(x > 0, s), (X, floats(2, 5, 4, seed=3)), {}),
    Case(
        "masked_scatter_rows",
        lambda x, m, s: x.masked_scatter(m[..., None], s),
        (X, ints(2, 5, high=2).bool(), floats(10, 4, seed=3)),
        {(0, 1): "S", (1, 1): "S"},
    ),
    one("bucketize", lambda x: torch.bucketize(x * 1, torch.tensor([-1.0, 0.0, 0.5]))),
    one("bucketize_right", lambda x: torch.bucketize(x.round(), torch.tensor([-1.0, 0.0, 1.0]), right=True)),
    one("slice_scatter", lambda x: torch.slice_scatter(x, x[..., :2] * 2, 2, 1, 3)),
    one("number_put_into_a_vector", number_put),
    one("select_scatter", lambda x: torch.select_scatter(x, x[..., 0] * 2, 2, -1)),
]


def with_column(x):
    y = x.clone()
    y[..., 0] = 5
    y[:, :, 2:] = x[:, :, :2] * 2
    return y


def with_row_added(x):
    y = x * 1
    y[0].add_(x[1])
    return y, y.sum()


def with_nested_write(x):
    y = torch.zeros_like(x)
    y[1][:, 1:3] = x[0, :, :2]
    return y


def with_mask_put(x):
    y = x.clone()
    y[x > 0] = -1.0
    return y


def with_places_put(x):
    y = torch.zeros(4, 3)
    y[torch.tensor([0, -1]), torch.tensor([2, 1])] = x[0, 0, :2]
    return y


def with_places_added(x):
    return torch.zeros(4, 4).index_put((torch.tensor([0, 1, 0]),), x[0, 0], accumulate=True)


WRITES = [
    one("write_column", with_column),
    one("write_row_added", with_row_added),
    one("write_nested", with_nested_write),
    one("write_by_mask", with_mask_put),
    one("write_at_places", with_places_put),
    one("write_added_at_places", with_places_added, tolerance=1e-5),
    one("write_in_place_chain", lambda x: (x * 1).add_(1).mul_(2).relu_()),
]

REDUCTIONS = [
    one("sum", lambda x: x.sum(-1), tolerance=1e-5),
    one("sum_keep", lambda x: x.sum(1, keepdim=True), tolerance=1e-5),
    one("sum_all", lambda x: x.sum(), tolerance=1e-5),
    one("sum_two", lambda x: x.sum((0, 2)), tolerance=1e-5),
    one("sum_of_bool", lambda x: (x > 0).sum(-1)),
    one("sum_of_int", lambda x: x.sum(1), x=N),
    one("sum_to_float", lambda x: x.sum(1, dtype=torch.float32), x=N),
    one("mean", lambda x: x.mean(-1), tolerance=1e-5),
    one("mean_symbolic", lambda x: x.mean(1, keepdim=True), tolerance=1e-5),
    one("mean_all", lambda x: x.mean(), tolerance=1e-5),
    one("prod", lambda x: x.prod(-1), tolerance=1e-5),
    one("amax", lambda x: x.amax(-1)),
    one("amin_two", lambda x: x.amin((1, 2))),
    one("max_all", lambda x: x.max()),
    one("min_all", lambda x: x.min()),
    one("max_along", lambda x: x.max(1)),
    one("min_along_keep", lambda x: x.min(-1, keepdim=True)),
    one("max_of_int", lambda x: x.max(-1), x=N),
    one("argmax", lambda x: x.argmax(-1)),
    one("argmax_first_of_equal", lambda x: x.argmax(1), x=N),
    one("argmin_keep", lambda x: x.argmin(1, keepdim=True)),
    one("argmax_flat", lambda x: x.argmax()),
    one("argmax_of_bool", lambda x: (x > 0).int().argmax(-1)),
    one("any", lambda x: (x > 1).any(-1)),
    one("any_all", lambda x: (x > 1).any()),
    one("all", lambda x: (x > -1).all(1)),
    one("all_of_int", lambda x: x.all(-1), x=N),
    one("any_of_float", lambda x: x.any(-1)),
    one("var", lambda x: x.var(-1), tolerance=1e-5),
    one("var_biased", lambda x: x.var(-1, unbiased=False), tolerance=1e-5),
    grown("var_symbolic", lambda x: x.var(1, keepdim=True), tolerance=1e-5),
    one("std", lambda x: x.std(-1), tolerance=1e-5),
    one("var_correction", lambda x: torch.var(x, dim=(0, 2), correction=0), tolerance=1e-5),
    one("logsumexp", lambda x: x.logsumexp(-1), tolerance=1e-5),
    one("logsumexp_keep", lambda x: x.logsumexp(1, keepdim=True), tolerance=1e-5),
    one("cumsum", lambda x: x.cumsum(1), tolerance=1e-5),
    one("cumsum_of_int", lambda x: x.cumsum(1), x=N),
    one("cumsum_of_mask", lambda x: (x > 0).cumsum(-1)),
    one("cumsum_of_bool_minus_one", lambda x: (x > 0).long().cumsum(1) - 1),
    one("topk", lambda x: x.topk(2, -1)),
    one("topk_smallest", lambda x: x.topk(2, -1, largest=False)),
    one("sort", lambda x: x.sort(-1)),
    one("sort_descending", lambda x: x.sort(-1, descending=True)),
    one("argsort", lambda x: x.argsort(-1)),
    one("norm", lambda x: x.norm(dim=-1), tolerance=1e-5),
    one("norm_one", lambda x: torch.linalg.vector_norm(x, 1, -1), tolerance=1e-5),
    one("norm_max", lambda x: torch.linalg.vector_norm(x, float("inf"), (1, 2))),
    one("norm_three", lambda x: torch.linalg.vector_norm(x, 3, -1, keepdim=True), tolerance=1e-5),
    one("normalize", lambda x: F.normalize(x, dim=-1), tolerance=1e-5),
]

CREATION = [
    one("arange_of_length", lambda x: torch.arange(x.shape[1])),
    one("arange_start", lambda x: torch.arange(2, x.shape[1] + 2)),
    one("arange_step", lambda x: torch.arange(0, 10, 3) + x.shape[1]),
    one("arange_float", lambda x: torch.arange(0, x.shape[1], dtype=torch.float32)),
    one("arange_fraction", lambda x: torch.arange(0, 1, 0.25) + x),
    one("arange_down", lambda x: torch.arange(5, 0, -2) + x.shape[1]),
    one("zeros", lambda x: torch.zeros(x.shape[1], 3)),
    one("ones_int", lambda x: torch.ones(x.shape[1], dtype=torch.long)),
    one("full", lambda x: torch.full((2, x.shape[1]), -1.5)),
    one("full_int", lambda x: torch.full((2, x.shape[1]), 7)),
    one("full_bool", lambda x: torch.full((2, x.shape[1]), True)),
    one("zeros_like", lambda x: torch.zeros_like(x)),
    one("ones_like_bool", lambda x: torch.ones_like(x, dtype=torch.bool)),
    one("full_like", lambda x: torch.full_like(x, 3)),
    one("new_ones", lambda x: x.new_ones(2, x.shape[1])),
    one("new_full", lambda x: x.new_full((x.shape[1],), 0.5)),
    one("new_zeros", lambda x: x.new_zeros(x.shape[1])),
    one("eye", lambda x: torch.eye(x.shape[1])),
    one("eye_wide", lambda x: torch.eye(3, 4) + x.sum()),
    one("tril", lambda x: x.tril()),
    one("triu_shifted", lambda x: x.triu(1)),
    one("tril_of_ones", lambda x: torch.ones(x.shape[1], x.shape[1]).tril(-1)),
    one("tril_of_bool", lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()),
    one("linspace", lambda x: torch.linspace(-1, 1, 5) + x.sum()),
    one("constant", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])),
    one("arange_by_a_length", lambda x: torch.arange(0, 3 * x.shape[1], x.shape[1])),
    one("constant_number", lambda x: x * torch.tensor(2.5)),
    one("scalar_where", lambda x: torch.where(x > 0, x, torch.tensor(0.0))),
]

CASES = SHAPES + SLICES + INDICES + WRITES + REDUCTIONS + CREATION


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("structure"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
