"""Lengths and amounts of what slides along axes: convolutions, poolings, patches."""

from collections.abc import Sequence

import sympy

from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.value import Value

__all__ = ["along", "batched", "each", "static", "unbatched", "window_count"]


def each(value: int | Sequence[int], count: int) -> list[int]:
    """One number for each of `count` axes, where torch takes one for all as well."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def window_count(length: Length, size: int, stride: int) -> Length:
    """How many windows of `size` fit into a length, one every `stride`."""
    if isinstance(length, int):
        return (length - size) // stride + 1
    return sympy.floor((length - size) / stride) + 1


def static(emit: Emit, lengths: Sequence[Length], what: str) -> list[int]:
    """Lengths as numbers. Raises EmitError where one of them is free."""
    if not all(isinstance(length, int) for length in lengths):
        raise emit.refuse(f"{what} of free lengths {tuple(lengths)}; tract needs numbers there")
    return [int(length) for length in lengths]


def batched(emit: Emit, x: Value, rank: int) -> Value:
    """The tensor with a batch axis of one in front when it has none."""
    return emit.unsqueeze(x, [0]) if x.rank < rank else x


def unbatched(emit: Emit, y: Value) -> Value:
    """The result without the batch axis that `batched` gave it."""
    return emit.squeeze(y, [0]) if y.rank > len(emit.shape) else y


def along(emit: Emit, x: Value, matrix: Value, axis: int) -> Value:
    """Multiply one axis of a tensor by a matrix [new, old]."""
    if axis == x.rank - 1:
        return emit.matmul(x, matrix, transpose_right=True)
    if axis == x.rank - 2:
        return emit.matmul(matrix, x)
    order = [place for place in range(x.rank) if place != axis] + [axis]
    moved = emit.matmul(emit.transpose(x, order), matrix, transpose_right=True)
    return emit.transpose(moved, [order.index(place) for place in range(x.rank)])
