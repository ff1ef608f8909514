"""The same elements in another shape, another order, or another dtype."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Length, product, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.repetition import repeated
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Number, Value
from t2n_hf.views import EXPANSIONS, RESHAPES, SAME, overloads_of

__all__ = ["axis_of"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis % rank if rank else 0


def _axes(axes: int | Sequence[int], rank: int) -> list[int]:
    return [axis_of(axis, rank) for axis in ([axes] if isinstance(axes, int) else axes)]


# Dtypes


@_emits(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other, _aten._to_copy.default)
@_emits(_aten.type_as.default)
def to(emit: Emit, x: Value | Number, *_: object, **__: object) -> Value:
    """`x` in another dtype, which the node's result tells."""
    return emit.tensor(x, emit.dtype)


@_emits(*overloads_of(SAME), _aten.detach_.default)
@_emits(_aten.dropout.default, _aten.dropout_.default, _aten.feature_dropout.default, _aten.alpha_dropout.default)
def identity(emit: Emit, x: Value | Number, p: object = None, train: object = False, **_: object) -> Value | Number:
    """`x` itself."""
    if train is True:
        raise emit.refuse("dropout is random in training; put the module in inference with eval()")
    return x


@_emits(_aten.copy.default)
def copy(emit: Emit, _x: Value, source: Value | Number, non_blocking: bool = False) -> Value:
    """`source` in the shape and dtype of x."""
    return emit.broadcast(emit.tensor(source, emit.dtype), emit.shape)


# Shapes


@_emits(*overloads_of(RESHAPES), _aten.unsqueeze_.default, _aten.squeeze_.dim)
def reshape(emit: Emit, x: Value, *_: object, **__: object) -> Value:
    """`x` in the shape of the node's result."""
    return emit.reshape(emit.tensor(x, emit.dtype), emit.shape)


@_emits(*overloads_of(EXPANSIONS))
def expand(emit: Emit, x: Value | Number, *_: object, **__: object) -> Value:
    """Axes of length 1 repeated."""
    source = emit.raised(emit.tensor(x, emit.dtype), len(emit.shape))
    return emit.broadcast(repeated(emit, source, emit.shape), emit.shape)


@_emits(_aten.broadcast_tensors.default)
def broadcast_tensors(emit: Emit, tensors: list[Value]) -> list[Value]:
    """Tensors brought to one shape."""
    return [emit.broadcast(emit.tensor(x, emit.dtype), emit.shape) for x in tensors]


@_emits(_aten.meshgrid.indexing, _aten.meshgrid.default)
def meshgrid(emit: Emit, tensors: list[Value], indexing: str = "ij") -> list[Value]:
    """Each tensor of rank 1 along its own axis of a grid."""
    rank = len(tensors)
    tensors = [emit.reshape(x, (1,)) if x.rank == 0 else x for x in tensors]
    order = list(range(rank))
    if indexing == "xy" and rank > 1:
        order[0], order[1] = 1, 0
    grids = [emit.unsqueeze(x, [axis for axis in range(rank) if axis != order[n]]) for n, x in enumerate(tensors)]
    return [emit.broadcast(grid, emit.shape) for grid in grids]


@_emits(_aten.transpose.int, _aten.transpose_.default, _aten.swapaxes.default, _aten.swapdims.default)
def transpose(emit: Emit, x: Value, first: int, second: int) -> Value:
    """Two axes exchanged."""
    order = list(range(x.rank))
    a, b = axis_of(first, x.rank), axis_of(second, x.rank)
    if order:
        order[a], order[b] = order[b], order[a]
    return emit.transpose(x, order)


@_emits(_aten.t.default, _aten.t_.default, _aten.numpy_T.default, _aten.mT.default)
def turned(emit: Emit, x: Value) -> Value:
    """All axes reversed (of a matrix, and of a batch of matrices for mT: the last two)."""
    if emit.node.target is _aten.mT.default:
        return emit.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])
    return emit.transpose(x, list(range(x.rank))[::-1])


@_emits(_aten.permute.default)
def permute(emit: Emit, x: Value, order: Sequence[int]) -> Value:
    """Axes in another order."""
    return emit.transpose(x, _axes(order, x.rank))


@_emits(_aten.movedim.int, _aten.movedim.intlist, _aten.moveaxis.int, _aten.moveaxis.intlist)
def movedim(emit: Emit, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    """Axes put at other places, the others in their order."""
    moved = dict(zip(_axes(destination, x.rank), _axes(source, x.rank), strict=True))
    rest = iter([axis for axis in range(x.rank) if axis not in moved.values()])
    return emit.transpose(x, [moved[at] if at in moved else next(rest) for at in range(x.rank)])


# Copies side by side


@_emits(_aten.cat.default, _aten.concat.default, _aten.concatenate.default)
def cat(emit: Emit, tensors: list[Value], dim: int = 0) -> Value:
    """Tensors joined along an axis. torch lets empty tensors of rank 1 pass beside any others."""
    rank = len(emit.shape)
    parts = [x for x in tensors if not (x.rank == 1 and rank > 1 and x.shape == (0,))]
    return emit.concat(parts, axis_of(dim, rank), emit.dtype)


@_emits(_aten.stack.default)
def stack(emit: Emit, tensors: list[Value | Number], dim: int = 0) -> Value:
    """Tensors joined along a new axis."""
    axis = axis_of(dim, len(emit.shape))
    parts = [emit.unsqueeze(emit.tensor(x, emit.dtype), [axis]) for x in tensors]
    return emit.concat(parts, axis, emit.dtype)


@_emits(_aten.hstack.default)
def hstack(emit: Emit, tensors: list[Value]) -> Value:
    """Tensors joined along the second axis, those of rank 1 along the first."""
    return emit.concat(tensors, 0 if tensors[0].rank == 1 else 1, emit.dtype)


@_emits(_aten.repeat.default, _aten.tile.default)
def repeat(emit: Emit, x: Value, repeats: Sequence[Length]) -> Value:
    """The whole tensor repeated along each axis."""
    counts = [1] * (len(emit.shape) - len(repeats)) + list(repeats)
    raised = emit.raised(x, len(counts)) if x.rank else emit.broadcast(x, (1,) * len(counts))
    if all(count == 1 for count in counts):
        return raised
    raised = repeated(emit, raised, emit.shape)
    counts = [1 if same(old, new) else count for old, new, count in zip(raised.shape, emit.shape, counts, strict=True)]
    if all(count == 1 for count in counts):
        return raised
    if all(length == 1 for length in raised.shape):
        return emit.broadcast(raised, emit.shape)
    if raised.dtype is torch.bool:
        return emit.cast(_tiled(emit, emit.cast(raised, torch.int64), counts), torch.bool)
    return _tiled(emit, raised, counts)


def _tiled(emit: Emit, x: Value, counts: Sequence[Length]) -> Value:
    return emit.call("tile", x, out=(emit.shape, x.dtype), repeats=list(counts))


@_emits(_aten.repeat_interleave.self_int)
def repeat_interleave(emit: Emit, x: Value, repeats: int, dim: int | None = None, **_: object) -> Value:
    """Each element repeated along an axis; without an axis, in the flattened tensor."""
    if dim is None:
        x, dim = emit.reshape(x, (product(x.shape),)), 0
    axis = axis_of(dim, x.rank)
    wide = emit.unsqueeze(x, [axis + 1])
    shape = [*wide.shape]
    shape[axis + 1] = repeats
    return emit.reshape(emit.broadcast(wide, shape), emit.shape)


@_emits(_aten.repeat_interleave.Tensor)
def repeated_places(emit: Emit, repeats: Value, **_: object) -> Value:
    """0 as often as the first number says, 1 as often as the second, ...: as many as `output_size` says."""
    return emit.cast(_places_repeated(emit, repeats, emit.shape[0]), emit.dtype)


@_emits(_aten.repeat_interleave.self_Tensor)
def repeat_interleave_each(emit: Emit, x: Value, repeats: Value, dim: int | None = None, **_: object) -> Value:
    """Each element of an axis as often as its number says, as many in all as `output_size` says."""
    axis = 0 if dim is None else axis_of(dim, x.rank)
    x = emit.reshape(x, (product(x.shape),)) if dim is None else x
    counts = emit.broadcast(emit.raised(repeats, 1), (x.shape[axis],))
    return emit.gather(x, _places_repeated(emit, counts, emit.shape[axis]), axis)


def _places_repeated(emit: Emit, repeats: Value, total: Length) -> Value:
    """The place of the element that each place of the result repeats: how many have ended before it."""
    count = repeats.shape[0]
    places = emit.range(0, count, torch.int64)
    upto = emit.binary("le", emit.unsqueeze(places, [0]), emit.unsqueeze(places, [1]), torch.int64, torch.bool)
    mine = emit.binary(
        "mul", emit.cast(upto, torch.int64), emit.unsqueeze(emit.cast(repeats, torch.int64), [0]), torch.int64
    )
    ends = emit.unsqueeze(emit.reduce("sum_reduce", mine, [1], keepdim=False), [0])
    results = emit.unsqueeze(emit.range(0, total, torch.int64), [1])
    ended = emit.binary("le", ends, results, torch.int64, torch.bool)
    return emit.reduce("sum_reduce", emit.cast(ended, torch.int64), [1], keepdim=False)
