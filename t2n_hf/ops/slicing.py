"""Parts of a tensor along an axis."""

from collections.abc import Sequence
from typing import Any, Final

import sympy
import torch

from t2n_hf.ops.arithmetic import whole_remainder
from t2n_hf.ops.dims import Length, product, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.shape import axis_of
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = ["bounded"]

_aten = torch.ops.aten
_emits = EMITTERS.emits
_END: Final = 2**63 - 1


def bounded(place: Length | None, length: Length, default: Length) -> Length:
    """A begin or end as torch takes it, made exact: counted from the front, and never outside the axis."""
    if place is None:
        return default
    if isinstance(place, int) and isinstance(length, int):
        return min(max(place + length if place < 0 else place, 0), length)
    if isinstance(place, int):
        if place >= _END:
            return length
        return _symbolic_bound(place, length)
    if _is_negative(place):
        place = length + place
        return place if _within(0, place) else sympy.Max(place, 0)
    return place if _within(place, length) else sympy.Min(place, length)


def _plain(place: Length | None, length: Length, default: Length) -> Length:
    """A begin or end counted from the front, taken to be inside the axis."""
    if place is None or (isinstance(place, int) and place >= _END):
        return default if place is None else length
    return length + place if _is_negative(place) else place


def _symbolic_bound(place: int, length: sympy.Expr) -> Length:
    if place < 0:
        # torch begins at 0 where fewer than -place elements are there.
        return length - 1 if place == -1 else sympy.Max(length + place, 0)
    return place if place == 0 else sympy.Min(place, length)


def _is_negative(place: Length) -> bool:
    """Whether a place counts from the end: symbols are lengths, so a sum of negative terms is below 0."""
    if isinstance(place, int):
        return place < 0
    return all(term.could_extract_minus_sign() for term in sympy.Add.make_args(sympy.expand(place)))


def _within(place: Length, length: Length) -> bool:
    """Whether the difference has no negative term: symbols are lengths, so it cannot be negative then."""
    terms = sympy.Add.make_args(sympy.expand(length - place))
    return all(not term.could_extract_minus_sign() for term in terms)


@_emits(_aten.slice.Tensor, _aten.slice_copy.Tensor)
def slice_(
    emit: Emit, x: Value, dim: int = 0, start: Length | None = None, end: Length | None = None, step: int = 1
) -> Value:
    """x[start:end:step] along an axis."""
    axis = axis_of(dim, x.rank)
    length = x.shape[axis]
    begin, stop = _plain(start, length, 0), _plain(end, length, length)
    if step != 1 or not same(stop - begin, emit.shape[axis]):  # what torch says needs no bounds where it fits
        begin, stop = bounded(start, length, 0), bounded(end, length, length)
    if emit.shape[axis] == 0 and isinstance(begin, int):
        stop = begin
    return emit.slice(x, axis, begin, stop, step)


@_emits(_aten.narrow.default)
def narrow(emit: Emit, x: Value, dim: int, start: Length, length: Length) -> Value:
    """`length` elements from `start` on."""
    axis = axis_of(dim, x.rank)
    begin = bounded(start, x.shape[axis], 0)
    return emit.slice(x, axis, begin, begin + length)


@_emits(_aten.select.int, _aten.select_copy.int)
def select(emit: Emit, x: Value, dim: int, index: Length) -> Value:
    """One element of an axis, which goes away."""
    axis = axis_of(dim, x.rank)
    if x.block is not None and axis == 0 and isinstance(index, int):
        place = emit.full((1,), index % int(x.shape[0]), torch.int64)
        return emit.squeeze(emit.gather(x, place, 0), [0])
    negative = isinstance(index, int) and index < 0
    begin = x.shape[axis] + index if negative else index
    return emit.squeeze(emit.slice(x, axis, begin, begin + 1), [axis])


def _cuts(emit: Emit, x: Value, axis: int, sizes: Sequence[Length]) -> list[Value]:
    begin: Length = 0
    parts = []
    for size in sizes:
        parts.append(emit.slice(x, axis, begin, begin + size))
        begin = begin + size
    return parts


def _sizes(emit: Emit, axis: int) -> list[Length]:
    return [emit.shape_of(value)[axis] for value in emit.node.meta["val"]]


@_emits(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.split.sizes, _aten.chunk.default)
@_emits(_aten.tensor_split.sections, _aten.unsafe_split.Tensor, _aten.unsafe_chunk.default)
def split(emit: Emit, x: Value, _parts: Any, dim: int = 0) -> list[Value]:  # noqa: ANN401 - sizes, or their number
    """An axis in parts, whose lengths the node's results tell."""
    axis = axis_of(dim, x.rank)
    return _cuts(emit, x, axis, _sizes(emit, axis))


@_emits(_aten.unbind.int)
def unbind(emit: Emit, x: Value, dim: int = 0) -> list[Value]:
    """Each element of an axis, which goes away."""
    axis = axis_of(dim, x.rank)
    count = len(emit.node.meta["val"])
    return [emit.squeeze(part, [axis]) for part in _cuts(emit, x, axis, [1] * count)]


@_emits(_aten.diff.default)
def diff(
    emit: Emit, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Value:
    """Differences of neighbours, n times."""
    if n == 0:  # torch adds nothing then
        return x
    axis = axis_of(dim, x.rank)
    parts = [part for part in (prepend, x, append) if part is not None]
    x = emit.concat(parts, axis, x.dtype)
    for _ in range(n):
        x = _difference(emit, x, axis)
    return x


def _difference(emit: Emit, x: Value, axis: int) -> Value:
    length = x.shape[axis]
    if same(length, 0):
        return x
    after, before = emit.slice(x, axis, 1, length), emit.slice(x, axis, 0, length - 1)
    if x.dtype is torch.bool:
        return emit.binary("tract_core_bitxor", after, before, torch.bool)
    return emit.binary("sub", after, before, x.dtype)


@_emits(_aten.roll.default)
def roll(emit: Emit, x: Value, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Value:
    """Elements moved along axes, those that fall off the end put in front."""
    amounts = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    if not axes:
        flat = emit.reshape(x, (product(x.shape),))
        return emit.reshape(roll(emit, flat, amounts, [0]), x.shape)
    if x.rank == 0:
        return x
    for amount, dim in zip(amounts, axes, strict=True):
        x = _rolled(emit, x, amount, axis_of(dim, x.rank))
    return x


def _rolled(emit: Emit, x: Value, amount: Length, axis: int) -> Value:
    length = x.shape[axis]
    if isinstance(length, int) and isinstance(amount, int):
        cut: Length = length - amount % max(length, 1)
    elif _within(0, amount) and _within(amount, length):
        cut = length - amount
    elif _is_negative(amount) and _within(0, length + amount):
        cut = -amount
    elif amount in (1, -1):
        cut = length - 1 if amount == 1 else 1
    else:  # the axis may be shorter
        places = emit.binary("sub", emit.range(0, length, torch.int64), amount, torch.int64)
        return emit.gather(x, whole_remainder(emit, places, length, torch.int64), axis)
    parts = [emit.slice(x, axis, cut, length), emit.slice(x, axis, 0, cut)]
    return emit.concat(parts, axis, x.dtype)


@_emits(_aten.flip.default)
def flip(emit: Emit, x: Value, dims: Sequence[int]) -> Value:
    """Axes read backwards."""
    for dim in dims:
        axis = axis_of(dim, x.rank)
        places = emit.range(0, x.shape[axis], torch.int64)
        last = emit.full((), x.shape[axis] - 1, torch.int64)
        x = emit.gather(x, emit.binary("sub", last, places, torch.int64), axis)
    return x


@_emits(_aten.glu.default)
def glu(emit: Emit, x: Value, dim: int = -1) -> Value:
    """First half times the sigmoid of the second half."""
    axis = axis_of(dim, x.rank)
    half = emit.shape[axis]
    first, second = _cuts(emit, x, axis, [half, half])
    return emit.binary("mul", first, emit.unary("sigmoid", second), x.dtype)
