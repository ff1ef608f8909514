"""Blocks of an image moved into channels and back, and windows laid side by side."""

from collections.abc import Sequence
from typing import Final

import torch

from t2n_hf.ops.convolution import deconvolved
from t2n_hf.ops.dims import Length, product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value
from t2n_hf.ops.windows import batched, each, static, unbatched, window_count

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_I64: Final = torch.int64


def _reordered(emit: Emit, x: Value, split: Sequence[Length], order: Sequence[int], lead: int) -> Value:
    """The axes behind the first `lead` ones split, put in another order, and joined to the shape of the result."""
    wide = emit.reshape(x, (*x.shape[:lead], *split))
    return emit.reshape(emit.transpose(wide, [*range(lead), *(lead + axis for axis in order)]), emit.shape)


@_emits(_aten.pixel_shuffle.default)
def pixel_shuffle(emit: Emit, x: Value, factor: int) -> Value:
    """[..., C * r * r, H, W] to [..., C, H * r, W * r]."""
    channels, high, wide = x.shape[-3:]
    split = (channels // factor**2, factor, factor, high, wide)
    return _reordered(emit, x, split, [0, 3, 1, 4, 2], x.rank - 3)


@_emits(_aten.pixel_unshuffle.default)
def pixel_unshuffle(emit: Emit, x: Value, factor: int) -> Value:
    """[..., C, H * r, W * r] to [..., C * r * r, H, W]."""
    high, wide = emit.shape[-2:]
    split = (x.shape[-3], high, factor, wide, factor)
    return _reordered(emit, x, split, [0, 2, 4, 1, 3], x.rank - 3)


@_emits(_aten.channel_shuffle.default, _aten.native_channel_shuffle.default)
def channel_shuffle(emit: Emit, x: Value, groups: int) -> Value:
    """Channels of `groups` groups dealt out in turn."""
    split = (groups, x.shape[1] // groups, *x.shape[2:])
    return _reordered(emit, x, split, [1, 0, *range(2, x.rank)], 1)


@_emits(_aten.im2col.default)
def im2col(
    emit: Emit,
    x: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """Windows of [N, C, H, W] side by side: [N, C * window, windows]."""
    x = batched(emit, x, 4)
    around = [(0, 0), (0, 0), *((n, n) for n in each(padding, 2))]
    shape = tuple(length + before + after for length, (before, after) in zip(x.shape, around, strict=True))
    if shape != x.shape:
        x = emit.call("pad", x, out=(shape, x.dtype), padding=around, border="constant", value=0.0)
    counts: list[Length] = []
    for axis, size, spread, step in zip((2, 4), each(kernel_size, 2), each(dilation, 2), each(stride, 2), strict=True):
        count = window_count(x.shape[axis], spread * (size - 1) + 1, step)
        inside = emit.unsqueeze(emit.range(0, size * spread, _I64, spread), [1])
        begins = emit.binary("mul", emit.range(0, count, _I64), step, _I64)
        x = emit.gather(x, emit.binary("add", inside, emit.unsqueeze(begins, [0]), _I64), axis)
        counts.append(count)
    batch, channels, high, _, wide, _ = x.shape
    windows = emit.transpose(x, [0, 1, 2, 4, 3, 5])
    return unbatched(emit, emit.reshape(windows, (batch, channels * high * wide, product(counts))))


@_emits(_aten.col2im.default)
def col2im(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    output_size: Sequence[Length],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """Windows [N, C * window, windows] put back to where they come from; those that overlap are added."""
    x = batched(emit, x, 3)
    kernel, spread, before, step = (each(value, 2) for value in (kernel_size, dilation, padding, stride))
    spans = [d * (k - 1) + 1 for d, k in zip(spread, kernel, strict=True)]
    counts = [
        window_count(length + 2 * n, span, s)
        for length, n, span, s in zip(output_size, before, spans, step, strict=True)
    ]
    after = static(
        emit,
        [
            (count - 1) * s + span - n - length
            for count, s, span, n, length in zip(counts, step, spans, before, output_size, strict=True)
        ],
        "what windows leave free at the end",
    )
    window = kernel[0] * kernel[1]
    channels = static(emit, [x.shape[1]], "channels")[0] // window
    spatial = emit.reshape(x, (x.shape[0], channels * window, *counts))
    weight = _dealing(emit, channels, kernel, x.dtype)
    cut = list(zip(before, after, strict=True))
    return unbatched(emit, deconvolved(emit, spatial, weight, step, cut, spread, channels))


def _dealing(emit: Emit, channels: int, kernel: list[int], dtype: torch.dtype) -> Value:
    """Weights [C * window, 1, kernel] that put each channel of a window at its own place of it."""
    window = kernel[0] * kernel[1]
    places = emit.range(0, window, _I64)
    same = emit.binary("eq", emit.unsqueeze(places, [1]), emit.unsqueeze(places, [0]), _I64, torch.bool)
    one = emit.reshape(emit.cast(same, dtype), (1, window, 1, *kernel))
    return emit.reshape(emit.broadcast(one, (channels, window, 1, *kernel)), (channels * window, 1, *kernel))
