"""Samples of an image at places that are calculated."""

from collections.abc import Sequence
from typing import Final

import torch

from t2n_hf.ops.dims import Length, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_F32: Final = torch.float32

# By torch's numbers.
_MODES: Final = ("bilinear", "nearest", "bicubic")
_PADDINGS: Final = ("zeros", "border", "reflection")


@_emits(_aten.grid_sampler.default, _aten.grid_sampler_2d.default, _aten.grid_sampler_3d.default)
def grid_sampler(
    emit: Emit, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    """Elements of x [N, C, ...] at the places of grid [N, ..., axes], which go from -1 to 1, last axis first."""
    mode, padding = _MODES[interpolation_mode], _PADDINGS[padding_mode]
    if (mode, padding) == ("bicubic", "border"):
        raise emit.refuse("a bicubic grid_sample with padding_mode 'border', which tract does otherwise than torch")
    result = emit.call(
        "tract_core_grid_sample",
        emit.cast(x, _F32),
        emit.cast(grid, _F32),
        out=(emit.shape, _F32),
        mode=mode,
        padding_mode=padding,
        align_corners=align_corners,
    )
    return emit.cast(result, emit.dtype)


@_emits(_aten.affine_grid_generator.default)
def affine_grid(emit: Emit, theta: Value, size: Sequence[Length], align_corners: bool) -> Value:
    """Places of an image of `size` [N, C, ...] after the affine maps theta [N, axes, axes + 1]."""
    lengths = list(size[2:])
    rank = len(lengths)
    axes = [_from_minus_one(emit, length, align_corners) for length in lengths]
    spread = [
        emit.broadcast(emit.unsqueeze(places, [axis for axis in range(rank) if axis != at]), lengths)
        for at, places in enumerate(axes)
    ]
    ones = emit.full(tuple(lengths), 1.0, _F32)
    columns = [emit.unsqueeze(part, [rank]) for part in (*reversed(spread), ones)]  # the last axis is x
    base = emit.reshape(emit.concat(columns, rank, _F32), (1, product(lengths), rank + 1))
    places = emit.matmul(base, emit.cast(theta, _F32), transpose_right=True)
    return emit.cast(emit.reshape(places, emit.shape), emit.dtype)


def _from_minus_one(emit: Emit, length: Length, align_corners: bool) -> Value:
    """Places from -1 to 1: of the elements' centres, or of the first and the last element."""
    if length == 1:
        return emit.full((1,), 0.0, _F32)
    places = emit.range(0, length, _F32)
    last = emit.full((), length - 1, _F32)
    unit = emit.binary("sub", emit.binary("div", emit.binary("mul", places, 2.0, _F32), last, _F32), 1.0, _F32)
    if align_corners:
        return unit
    return emit.binary("mul", unit, emit.binary("div", last, emit.full((), length, _F32), _F32), _F32)
