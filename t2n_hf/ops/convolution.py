"""Convolutions, and those that go back. Paddings are in `pooling`."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits

_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)
_NAMED = (_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding)


def _each(value: int | Sequence[int], count: int) -> list[int]:
    """One number for each spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _batched(emit: Emit, x: Value, rank: int) -> Value:
    return emit.unsqueeze(x, [0]) if x.rank < rank else x


def _unbatched(emit: Emit, y: Value) -> Value:
    return emit.squeeze(y, [0]) if y.rank > len(emit.shape) else y


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
    count = weight.rank - 2
    steps, spread = _each(stride, count), _each(dilation, count)
    kernel = [int(length) for length in weight.shape[2:]]
    if padding == "same":
        around = [
            (total // 2, total - total // 2) for total in (d * (k - 1) for d, k in zip(spread, kernel, strict=True))
        ]
    elif padding == "valid":
        around = [(0, 0)] * count
    else:
        around = [(n, n) for n in _each(padding, count)]  # type: ignore[arg-type]
    result = _convolve(emit, _batched(emit, x, weight.rank), weight, steps, around, spread, groups)
    if bias is not None:
        result = _add_channels(emit, result, bias)
    return _unbatched(emit, result)


def _convolve(  # noqa: PLR0917 - what a convolution is
    emit: Emit,
    x: Value,
    weight: Value,
    stride: list[int],
    around: list[tuple[int, int]],
    dilation: list[int],
    groups: int,
) -> Value:
    shape = [x.shape[0], weight.shape[0]]
    for axis, (k, s, d, (before, after)) in enumerate(
        zip(weight.shape[2:], stride, dilation, around, strict=True), start=2
    ):
        shape.append((x.shape[axis] + before + after - d * (k - 1) - 1) // s + 1)
    # Without `padding` the result would have the input's lengths: it is always written.
    return emit.call(
        "conv",
        x,
        weight,
        out=(shape, emit.dtype),
        border="constant",
        padding=around,
        stride=stride,
        dilation=dilation,
        groups=groups,
    )


def _add_channels(emit: Emit, x: Value, bias: Value) -> Value:
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
    count = weight.rank - 2
    if any(_each(output_padding, count)):
        raise emit.refuse("a transposed convolution with output_padding")
    if groups != 1:
        raise emit.refuse("a transposed convolution in groups")
    result = emit.call(
        "deconv",
        _batched(emit, x, weight.rank),
        emit.transpose(weight, [1, 0, *range(2, weight.rank)]),
        out=(_batched_shape(emit, weight.rank), emit.dtype),
        border="constant",
        padding=[(n, n) for n in _each(padding, count)],
        stride=_each(stride, count),
        dilation=_each(dilation, count),
        groups=1,
    )
    if bias is not None:
        result = _add_channels(emit, result, bias)
    return _unbatched(emit, result)


def _batched_shape(emit: Emit, rank: int) -> list[Length]:
    return [1] * (rank - len(emit.shape)) + list(emit.shape)
