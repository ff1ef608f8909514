"""Elements chosen by a rule: diagonals, windows, strides, triangles."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Length, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _steps(emit: Emit, count: Length, step: Length, start: Length = 0) -> Value:
    """start, start + step, ...: `count` of them."""
    places = emit.range(0, count, torch.int64)
    places = places if step == 1 else emit.binary("mul", places, step, torch.int64)
    return places if start == 0 else emit.binary("add", places, start, torch.int64)


@_emits(_aten.diagonal.default, _aten.diagonal_copy.default, _aten.linalg_diagonal.default)
def diagonal(emit: Emit, x: Value, offset: int = 0, dim1: int | None = None, dim2: int | None = None) -> Value:
    """A diagonal of two axes, along a new last axis."""
    first, second = (-2, -1) if emit.node.target is _aten.linalg_diagonal.default else (0, 1)
    rows = axis_of(first if dim1 is None else dim1, x.rank)
    columns = axis_of(second if dim2 is None else dim2, x.rank)
    others = [axis for axis in range(x.rank) if axis not in (rows, columns)]
    matrices = emit.transpose(x, [*others, rows, columns])
    height, width = matrices.shape[-2:]
    flat = emit.reshape(matrices, (*matrices.shape[:-2], height * width))
    start = offset if offset >= 0 else -offset * width
    return emit.gather(flat, _steps(emit, emit.shape[-1], width + 1, start), len(others))


def _on_diagonal(emit: Emit, height: Length, width: Length, offset: int) -> Value:
    down = emit.unsqueeze(_steps(emit, height, 1, offset), [1])
    along = emit.unsqueeze(emit.range(0, width, torch.int64), [0])
    return emit.binary("eq", down, along, torch.int64, torch.bool)


def _put_on_diagonal(emit: Emit, matrices: Value, source: Value, offset: int) -> Value:
    """Matrices with the last axis of `source` on a diagonal."""
    height, width = matrices.shape[-2:]
    kind = torch.int64 if source.dtype is torch.bool else source.dtype
    numbers, across, last = emit.cast(source, kind), offset >= 0, source.rank - 1
    # Above the main diagonal the row says which element it is, below it the column does; the rest is never chosen.
    missing = (height if across else width) - source.shape[-1]
    if missing != 0:
        numbers = emit.concat([numbers, emit.full((*source.shape[:-1], missing), 0, kind)], last, kind)
    wide = emit.broadcast(emit.unsqueeze(numbers, [last + 1 if across else last]), matrices.shape)
    chosen = emit.select(_on_diagonal(emit, height, width, offset), wide, emit.cast(matrices, kind), kind)
    return emit.cast(chosen, source.dtype)


@_emits(_aten.diag_embed.default)
def diag_embed(emit: Emit, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """Matrices with the last axis on a diagonal, and zeros elsewhere."""
    rank = x.rank + 1
    rows, columns = axis_of(dim1, rank), axis_of(dim2, rank)
    side = x.shape[-1] + abs(offset)
    zeros = emit.full((*x.shape[:-1], side, side), 0, x.dtype)
    return _turned_back(emit, _put_on_diagonal(emit, zeros, x, offset), rows, columns)


def _turned_back(emit: Emit, x: Value, rows: int, columns: int) -> Value:
    """The last two axes at the places `rows` and `columns`."""
    rest = iter(range(x.rank - 2))
    order = [x.rank - 2 if at == rows else x.rank - 1 if at == columns else next(rest) for at in range(x.rank)]
    return emit.transpose(x, order)


@_emits(_aten.diagonal_scatter.default)
def diagonal_scatter(emit: Emit, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """`x` with a diagonal of two axes replaced."""
    rows, columns = axis_of(dim1, x.rank), axis_of(dim2, x.rank)
    order = [*(axis for axis in range(x.rank) if axis not in (rows, columns)), rows, columns]
    put = _put_on_diagonal(emit, emit.transpose(x, order), emit.cast(source, x.dtype), offset)
    return _turned_back(emit, put, rows, columns)


@_emits(_aten.unfold.default, _aten.unfold_copy.default)
def unfold(emit: Emit, x: Value, dimension: int, size: int, step: int) -> Value:
    """All windows of an axis, `step` apart, each along a new last axis."""
    if x.rank == 0:
        return emit.broadcast(x, (size,))
    axis = axis_of(dimension, x.rank)
    count = emit.shape[axis]
    starts = emit.unsqueeze(_steps(emit, count, step), [1])
    inside = emit.unsqueeze(emit.range(0, size, torch.int64), [0])
    windows = emit.gather(x, emit.binary("add", starts, inside, torch.int64), axis)
    order = [at for at in range(windows.rank) if at != axis + 1]
    return emit.transpose(windows, [*order, axis + 1])


def _axes_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """The axes from the slowest to the fastest, of a tensor that fills its memory; None for one that does not."""
    if tensor.storage_offset() != 0:
        return None
    if tensor.is_contiguous():
        return list(range(tensor.ndim))
    shape, stride = tensor.shape, tensor.stride()
    if not all(isinstance(number, int) for number in (*shape, *stride)):
        return None
    order = sorted(range(tensor.ndim), key=lambda axis: (shape[axis] == 1, stride[axis]), reverse=True)
    filled = 1
    for axis in reversed(order):
        if shape[axis] != 1 and stride[axis] != filled:
            return None
        filled *= shape[axis]
    return order


@_emits(_aten.as_strided.default, _aten.as_strided_copy.default)
def as_strided(
    emit: Emit, x: Value, size: Sequence[Length], stride: Sequence[Length], storage_offset: Length | None = None
) -> Value:
    """Elements of what x is stored in, `stride[k]` apart along axis k.

    Of a tensor that fills what it is stored in, with its axes in any order: of another the archive does not know the
    elements in between.
    """
    source = emit.node.args[0].meta["val"]  # type: ignore[union-attr]
    order = _axes_in_memory(source)
    if order is None:
        raise emit.refuse("as_strided of a tensor that is not contiguous; call contiguous() before, or index it")
    if order != sorted(order):
        x = emit.transpose(x, order)
    if not size:
        places = emit.full((), storage_offset or 0, torch.int64)
        return emit.gather(emit.reshape(x, (product(x.shape),)), places, 0)
    rank = len(size)
    total: Value | None = None
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        start = (storage_offset or 0) if axis == 0 else 0
        places = emit.unsqueeze(_steps(emit, count, step, start), [other for other in range(rank) if other != axis])
        total = places if total is None else emit.binary("add", total, places, torch.int64)
    return emit.gather(emit.reshape(x, (product(x.shape),)), total, 0)  # type: ignore[arg-type]


@_emits(_aten.tril_indices.default, _aten.triu_indices.default)
def triangle_indices(emit: Emit, row: int, col: int, offset: int = 0, **_: object) -> Value:
    """Rows and columns of the elements of a triangle, row by row."""
    lower = emit.node.target is _aten.tril_indices.default
    count = emit.shape[1]
    ones = emit.full((row, col), 1, torch.float32)
    triangle = emit.unary("tract_core_trilu", ones, upper=not lower, k=offset)
    # The places of the first `count` of a list of ones and zeros in order are those of the ones.
    flat = emit.reshape(triangle, (row * col,))
    outs = [((count,), torch.float32), ((count,), torch.int64)]
    places = emit.call_many("tract_core_topk", flat, outs=outs, k=count, axis=0, largest=True)[1]
    rows = emit.binary("div", places, col, torch.int64)
    columns = emit.binary("sub", places, emit.binary("mul", rows, col, torch.int64), torch.int64)
    both = [emit.unsqueeze(part, [0]) for part in (rows, columns)]
    return emit.cast(emit.concat(both, 0, torch.int64), emit.dtype)
