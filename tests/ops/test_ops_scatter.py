"""Elements put into tensors, and tensors read by a rule, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

pytestmark = [pytest.mark.tract, pytest.mark.filterwarnings("ignore:(index_reduce|The reduce argument)")]


def ints(*shape: int, high: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


X = floats(2, 5, 4)
S = {(0, 1): "S"}
WIDE = torch.cat([X, X * 3], 1)
LONG = ((WIDE[:, :9],),)


def one(name, function, x=X, **options):
    wide = torch.cat([x, x], 1)
    return Case(name, function, (x,), S, ((wide[:, :9],),), least=4, tolerance=1e-5, **options)


def fixed(name, function, *inputs):
    return Case(name, function, inputs, tolerance=1e-5)


def put(*indices, accumulate=False):
    return lambda x, v: torch.ops.aten.index_put(x, indices, v, accumulate)


AT, TO = torch.tensor([1, 0, -1]), torch.tensor([0, -1, 2])
TWICE = torch.tensor([1, 1, 0])
M = ints(2, 5, high=2).bool()

ROW, PLACE = floats(7), torch.tensor(2)


def row(name, function):
    """A list of free length, and one place in it that is a number."""
    return Case(name, function, (ROW, PLACE), {(0, 0): "S"}, ((floats(9, seed=1), PLACE + 1),), least=4)


NUMBERS = [
    row("scattered_at_one_place", lambda x, at: x.scatter(0, at, 7.0)),
    row("scattered_one_number", lambda x, at: x.scatter(0, at, x[0])),
    row("added_at_one_place", lambda x, at: x.scatter_add(-1, at, x[3])),
    row("largest_at_one_place", lambda x, at: x.scatter_reduce(0, at, x[3], "amax")),
    row("gathered_from_one_place", lambda x, at: x.gather(0, at)),
    row("selected_at_one_place", lambda x, at: x[:, None].index_select(0, at)),
    row("filled_at_one_place", lambda x, at: x.index_fill(0, at, 3.0)),
]

PUTS = [
    fixed("put_after_a_whole_axis", lambda x, v: put(None, AT)(x, v), X, floats(2, 3, 4)),
    fixed("put_after_two_whole_axes", lambda x, v: put(None, None, AT)(x, v), X, floats(3)),
    fixed("put_at_indices_apart", lambda x, v: put(AT, None, TO)(x, v), X, floats(3, 5)),
    fixed("put_at_indices_side_by_side", lambda x, v: put(None, AT, TO)(x, v), X, floats(2, 3)),
    fixed("put_one_row_everywhere", lambda x, v: put(None, AT)(x, v), X, floats(4)),
    fixed("put_at_a_grid", lambda x, v: put(torch.tensor([[0], [1]]), TO)(x, v), X, floats(2, 3, 4)),
    fixed(
        "add_at_places_that_repeat", lambda x, v: put(None, torch.tensor([1, 1, 0]), accumulate=True)(x, v), X, X[:, :3]
    ),
    one("put_at_last", lambda x: put(None, torch.tensor([-1]))(x, x[:, :1] * 2)),
    one("put_by_mask_of_rows", lambda x: x.index_put((x[..., 0] > 0,), torch.tensor(5.0))),
    one("put_row_by_mask", lambda x: x.index_put((x[..., 0] > 0,), torch.arange(4.0))),
    one("put_by_mask_after_an_axis", lambda x: put(None, x[0, :, 0] > 0)(x, torch.tensor(5.0))),
    fixed("put_next_value_by_mask", lambda x, m, v: x.index_put((m,), v), X, M, floats(int(M.sum()), 4)),
    fixed("put_bool_by_mask", lambda x, m: (x > 0).index_put((m,), torch.tensor(True)), X, M),
    fixed("put_flat", lambda x, v: x.put(torch.tensor([0, 39, -2]), v), X, floats(3)),
    fixed("put_flat_adds", lambda x, v: x.put(torch.tensor([0, 7, 7]), v, accumulate=True), X, floats(3)),
]
PLACES = ints(2, 5, 2, high=4)
SCATTERS = [
    fixed("scatter_shorter_index", lambda x, i: x.scatter(2, i[:1, :3], x * 2), X, PLACES),
    fixed("scatter_into_bool", lambda x, i: (x > 0).scatter(2, i, True), X, PLACES),
    fixed("scatter_adds", lambda x, i: x.scatter(2, i, x * 2, reduce="add"), X, PLACES),
    fixed("scatter_multiplies", lambda x, i: x.scatter(2, i, 3.0, reduce="multiply"), X, PLACES),
    *(
        fixed(
            f"scatter_reduce_{name}_{'with' if kept else 'without'}_self",
            lambda x, i, name=name, kept=kept: x.scatter_reduce(1, i, x[..., :2] * 2, name, include_self=kept),
            X,
            ints(2, 5, 2, high=3),
        )
        for name in ("sum", "prod", "mean", "amax", "amin")
        for kept in (True, False)
    ),
    fixed("scatter_mean_of_int", lambda x, i: x.scatter_reduce(1, i, x - 3, "mean"), ints(2, 5), ints(2, 5, high=3)),
    one("index_add", lambda x: x.index_add(1, torch.tensor([2, 0, 2]), x[:, :3])),
    one("index_add_alpha", lambda x: x.index_add(-1, torch.tensor([1, 1]), x[..., :2], alpha=0.5)),
    one("index_add_rows_to_zeros", lambda x: torch.zeros(6, 4).index_add(0, torch.tensor([5, 1, 5]), x[0, :3])),
    one("index_copy", lambda x: x.index_copy(1, torch.tensor([2, 0]), x[:, :2] * 3)),
    one("index_fill", lambda x: x.index_fill(2, torch.tensor([0, -1]), 7.0)),
    one("index_reduce_mean", lambda x: x.index_reduce(1, torch.tensor([2, 0, 2]), x[:, :3], "mean")),
    one(
        "index_reduce_amax_alone",
        lambda x: x.index_reduce(1, TWICE, x[:, :3], "amax", include_self=False),
    ),
    one("slice_scatter_with_step", lambda x: x.slice_scatter(x[:, :2] * 2, 1, 0, 3, 2)),
    one("slice_scatter_from_end", lambda x: x.slice_scatter(x[:, :2] * 2, 1, -2)),
    fixed("masked_scatter_broadcast", lambda x, m, v: x.masked_scatter(m[..., None], v), X, M, floats(40)),
    fixed("take", lambda x: x.take(torch.tensor([[0, 39], [-1, 3]])), X),
    fixed("take_along_all", lambda x: x.take_along_dim(torch.tensor([3, 39, 0])), X),
    fixed("one_hot", lambda i: torch.nn.functional.one_hot(i, 6), ints(2, 5)),
]
RULES = [
    one("diagonal", lambda x: x.diagonal(0, 1, 2)),
    one("diagonal_above_first_axes", lambda x: x.diagonal(1)),
    one("diagonal_below", lambda x: x.diagonal(-1, 2, 1)),
    one("diag_embed", lambda x: x.diag_embed()),
    one("diag_embed_above", lambda x: x.diag_embed(2, 0, -1)),
    one("diag_embed_below_of_bool", lambda x: (x > 0).diag_embed(-1)),
    one("diag_of_vector", lambda x: x[0, :, 0].diag()),
    one("diag_of_matrix", lambda x: x[0].diag(-1)),
    fixed("diagonal_scatter", lambda x, v: x.diagonal_scatter(v, 0, 1, 2), X, floats(2, 4)),
    fixed("diagonal_scatter_above", lambda x, v: x.diagonal_scatter(v, 1, 1, 2), X, floats(2, 3)),
    fixed("diagonal_scatter_below", lambda x, v: x.diagonal_scatter(v, -2, 1, 2), X, floats(2, 3)),
    one("unfold", lambda x: x.unfold(1, 3, 1)),
    one("unfold_apart", lambda x: x.unfold(1, 2, 2)),
    one("unfold_last", lambda x: x.unfold(-1, 3, 1)),
    fixed("as_strided", lambda x: x.as_strided((3, 2, 2), (4, 1, 9), 2), X),
    fixed("as_strided_number", lambda x: x.as_strided((), (), 7), X),
    one("tril_indices", lambda x: torch.tril_indices(3, 4, -1) + x.shape[1]),
    one("triu_indices", lambda x: torch.triu_indices(4, 3, 1) + x.shape[1]),
]
CASES = NUMBERS + PUTS + SCATTERS + RULES


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("scatter"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
