"""Convolutions, and those that go back."""

from collections.abc import Sequence
from typing import Any

import torch

from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value
from t2n_hf.ops.windows import batched, each, static, unbatched, window_count

__all__ = ["deconvolved"]

_aten = torch.ops.aten
_emits = EMITTERS.emits

_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)
_NAMED = (_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding)


@_emits(*_CONVOLUTIONS, *_NAMED)
def conv(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Value:
    """Convolution of [N, C, ...] with [O, C / groups, ...]."""
    _check(emit, x, weight)
    count = weight.rank - 2
    spread = each(dilation, count)
    around = _around(weight, padding, spread)
    source, weight = emit.wide(batched(emit, x, weight.rank)), emit.wide(weight)
    spans = [d * (int(k) - 1) + 1 for d, k in zip(spread, weight.shape[2:], strict=True)]
    source, steps = _thinned(emit, source, spans, around, each(stride, count))
    lengths = [
        window_count(length + before + after, span, step)
        for length, span, step, (before, after) in zip(source.shape[2:], spans, steps, around, strict=True)
    ]
    # Without `padding` the result would have the input's lengths: it is always written.
    result = emit.call(
        "conv",
        source,
        weight,
        out=((source.shape[0], weight.shape[0], *lengths), source.dtype),
        border="constant",
        padding=around,
        stride=steps,
        dilation=spread,
        groups=groups,
    )
    return unbatched(emit, _biased(emit, emit.cast(result, emit.dtype), bias))


def _thinned(
    emit: Emit, x: Value, spans: list[int], around: list[tuple[int, int]], stride: list[int]
) -> tuple[Value, list[int]]:
    """Take what a kernel of one element does not step over, and step by one.

    tract would do so itself, by slices with a stride that it moves up through the graph and over some reshapes fails
    to.
    """
    steps = list(stride)
    for place, (span, sides) in enumerate(zip(spans, around, strict=True)):
        if span == 1 and stride[place] > 1 and sides == (0, 0):
            x = emit.slice(x, 2 + place, 0, x.shape[2 + place], stride[place])
            steps[place] = 1
    return x, steps


def _check(emit: Emit, x: Value, weight: Value) -> None:
    static(emit, weight.shape, "a convolution kernel")
    if not x.dtype.is_floating_point:
        raise emit.refuse(f"a convolution of {x.dtype}; cast to a float type before")


def _around(weight: Value, padding: int | str | Sequence[int], dilation: list[int]) -> list[tuple[int, int]]:
    """What is put before and after each axis. For "same", torch puts the odd one after."""
    count = weight.rank - 2
    if padding == "same":
        totals = [d * (int(k) - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if padding == "valid":
        return [(0, 0)] * count
    return [(n, n) for n in each(padding, count)]  # type: ignore[arg-type]


def _biased(emit: Emit, x: Value, bias: Value | None) -> Value:
    if bias is None:
        return x
    return emit.binary("add", x, emit.unsqueeze(bias, [axis for axis in range(x.rank) if axis != 1]), x.dtype)


@_emits(_aten.conv_transpose1d.default, _aten.conv_transpose2d.input, _aten.conv_transpose3d.input)
def conv_transpose(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Value:
    """The convolution that goes back, of [N, C, ...] with [C, O / groups, ...]."""
    _check(emit, x, weight)
    count = weight.rank - 2
    before, more = each(padding, count), each(output_padding, count)
    result = deconvolved(
        emit,
        batched(emit, x, weight.rank),
        weight,
        each(stride, count),
        [(n, n - extra) for n, extra in zip(before, more, strict=True)],
        each(dilation, count),
        groups,
    )
    return unbatched(emit, _biased(emit, result, bias))


def deconvolved(  # noqa: PLR0917 - what a transposed convolution is
    emit: Emit,
    x: Value,
    weight: Value,
    stride: list[int],
    cut: list[tuple[int, int]],
    dilation: list[int],
    groups: int,
) -> Value:
    """Transposed convolution of [N, C, ...] with [C, O / groups, ...].

    `cut` says what is taken away from each end of each axis; what is less than nothing is zeros put there.
    """
    dtype, x, weight = x.dtype, emit.wide(x), emit.wide(weight)
    channels, outputs, *kernel = (int(length) for length in weight.shape)
    # tract wants output channels first, the groups side by side.
    turned = emit.reshape(weight, (groups, channels // groups, outputs, *kernel))
    turned = emit.transpose(turned, [0, 2, 1, *range(3, turned.rank)])
    turned = emit.reshape(turned, (groups * outputs, channels // groups, *kernel))
    taken = [(max(before, 0), max(after, 0)) for before, after in cut]
    lengths: list[Length] = [
        (length - 1) * step + spread * (size - 1) + 1 - before - after
        for length, step, spread, size, (before, after) in zip(
            x.shape[2:], stride, dilation, kernel, taken, strict=True
        )
    ]
    result = emit.call(
        "deconv",
        x,
        turned,
        out=((x.shape[0], groups * outputs, *lengths), x.dtype),
        border="constant",
        padding=taken,
        stride=stride,
        dilation=dilation,
        groups=groups,
    )
    result = emit.cast(result, dtype)
    added = [(0, 0), (0, 0), *((max(-before, 0), max(-after, 0)) for before, after in cut)]
    if not any(map(any, added)):
        return result
    shape = [length + before + after for length, (before, after) in zip(result.shape, added, strict=True)]
    return emit.call("pad", result, out=(shape, dtype), padding=added, border="constant", value=0.0)


@_emits(_aten.convolution.default, _aten._convolution.default)
def convolution(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,  # noqa: ANN401 - how cuDNN does it
) -> Value:
    """Either of the two."""
    if transposed:
        return conv_transpose(emit, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(emit, x, weight, bias, stride, padding, dilation, groups)


@_emits(_aten.conv_tbc.default)
def conv_tbc(emit: Emit, x: Value, weight: Value, bias: Value, pad: int = 0) -> Value:
    """Convolution along the first axis of [T, N, C] with [K, C, O]."""
    source, kernel = (emit.wide(emit.transpose(v, order)) for v, order in ((x, [1, 2, 0]), (weight, [2, 1, 0])))
    length = window_count(x.shape[0] + 2 * pad, int(weight.shape[0]), 1)
    shape = (x.shape[1], weight.shape[2], length)
    around = [(pad, pad)]
    result = emit.call(
        "conv", source, kernel, out=(shape, source.dtype), border="constant", padding=around, stride=[1], dilation=[1]
    )
    return emit.transpose(_biased(emit, emit.cast(result, emit.dtype), bias), [2, 0, 1])
