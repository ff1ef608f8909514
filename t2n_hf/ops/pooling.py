"""Poolings, paddings and changes of resolution."""

from collections.abc import Sequence
from typing import Any

import torch

from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _each(value: int | Sequence[int], count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _window(
    emit: Emit,
    op: str,
    x: Value,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    **options: Any,  # noqa: ANN401
) -> Value:
    """`op` over windows of the last axes; tract wants the size of a window for all axes."""
    lead = x.rank - len(kernel)
    ones = [1] * lead
    return emit.call(
        op,
        x,
        out=(emit.shape, x.dtype),
        size=ones + kernel,
        stride=ones + stride,
        padding=[(0, 0)] * lead + [(n, n) for n in padding],
        dilation=ones + options.pop("dilation", [1] * len(kernel)),
        **options,
    )


def _sides(
    kernel: int | Sequence[int], stride: int | Sequence[int] | None, padding: int | Sequence[int], count: int
) -> tuple[list[int], list[int], list[int]]:
    size = _each(kernel, count)
    return size, (_each(stride, count) if stride else size), _each(padding, count)


@_emits(_aten.max_pool1d.default, _aten.max_pool2d.default)
def max_pool(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Value:
    """Greatest element of each window."""
    if ceil_mode:
        raise emit.refuse("a pooling with ceil_mode")
    count = 1 if emit.node.target is _aten.max_pool1d.default else 2
    kernel, step, around = _sides(kernel_size, stride, padding, count)
    return _window(emit, "max_pool", x, kernel, step, around, dilation=_each(dilation, count), border="ignore")


@_emits(_aten.avg_pool1d.default, _aten.avg_pool2d.default)
def avg_pool(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Mean of each window."""
    if ceil_mode or divisor_override is not None:
        raise emit.refuse("an average pooling with ceil_mode or divisor_override")
    kernel, step, around = _sides(
        kernel_size, stride, padding, 1 if emit.node.target is _aten.avg_pool1d.default else 2
    )
    border = "constant" if count_include_pad else "ignore"
    return _window(emit, "box", x, kernel, step, around, border=border, normalize=True)


@_emits(_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool(emit: Emit, x: Value, output_size: int | Sequence[int]) -> Value:
    """Mean of as many windows as asked."""
    sizes = [output_size] if isinstance(output_size, int) else list(output_size)
    axes = list(range(x.rank - len(sizes), x.rank))
    if all(size == 1 for size in sizes):
        return emit.reduce("mean_reduce", x, axes, keepdim=True)
    lengths = [x.shape[axis] for axis in axes]
    if not all(isinstance(n, int) and n % size == 0 for n, size in zip(lengths, sizes, strict=True)):
        raise emit.refuse(f"an adaptive pooling of lengths {lengths} to {sizes}, which do not divide them")
    kernel = [int(n) // size for n, size in zip(lengths, sizes, strict=True)]
    return _window(emit, "box", x, kernel, kernel, [0] * len(kernel), border="constant", normalize=True)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "replicated"}


@_emits(_aten.pad.default)
def pad(emit: Emit, x: Value, amounts: Sequence[Length], mode: str = "constant", value: float | None = None) -> Value:
    """Elements put around the last axes; `amounts` are (before, after) from the last axis on. Negative ones cut."""
    sides: list[tuple[Length, Length]] = [(0, 0)] * x.rank
    for place in range(len(amounts) // 2):
        sides[x.rank - 1 - place] = (amounts[2 * place], amounts[2 * place + 1])
    x = _cut(emit, x, sides)
    added = [tuple(0 if _negative(n) else n for n in side) for side in sides]
    if mode == "constant":
        return _filled(emit, x, added, 0 if value is None else value)
    if mode not in _MODES or not all(isinstance(n, int) for side in added for n in side):
        raise emit.refuse(f"a padding of mode {mode!r}")
    shape = [length + before + after for length, (before, after) in zip(x.shape, added, strict=True)]
    return emit.call("pad", x, out=(shape, x.dtype), padding=added, border=_MODES[mode])


@_emits(_aten.constant_pad_nd.default)
def constant_pad_nd(emit: Emit, x: Value, amounts: Sequence[Length], value: float = 0) -> Value:
    """One value put around the last axes."""
    return pad(emit, x, amounts, "constant", value)


def _negative(length: Length) -> bool:
    return isinstance(length, int) and length < 0


def _cut(emit: Emit, x: Value, sides: list[tuple[Length, Length]]) -> Value:
    for axis, (before, after) in enumerate(sides):
        if _negative(before) or _negative(after):
            begin = -before if _negative(before) else 0
            end = x.shape[axis] + after if _negative(after) else x.shape[axis]
            x = emit.slice(x, axis, begin, end)
    return x


def _filled(emit: Emit, x: Value, sides: Sequence[tuple[Length, ...]], value: float) -> Value:
    """Constant blocks joined around: for lengths that are symbols, and for any dtype."""
    for axis, side in enumerate(sides):
        blocks = [None if same(n, 0) else [*x.shape[:axis], n, *x.shape[axis + 1 :]] for n in side]
        before, after = [None if shape is None else emit.full(tuple(shape), value, x.dtype) for shape in blocks]
        x = emit.concat([part for part in (before, x, after) if part is not None], axis, x.dtype)
    return x


@_emits(_aten.upsample_nearest1d.vec, _aten.upsample_nearest2d.vec)
def upsample_nearest(
    emit: Emit, x: Value, output_size: Sequence[Length] | None, scale_factors: Sequence[float] | None = None
) -> Value:
    """Each element repeated along the last axes, a whole number of times."""
    target = emit.shape
    for axis in range(2, x.rank):
        times = _whole_factor(emit, x.shape[axis], target[axis])
        if times == 1:
            continue
        wide = emit.unsqueeze(x, [axis + 1])
        shape = [*wide.shape]
        shape[axis + 1] = times
        joined = [*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :]]
        x = emit.reshape(emit.broadcast(wide, shape), joined)
    return x


def _whole_factor(emit: Emit, old: Length, new: Length) -> int:
    for times in range(1, 65):
        if same(old * times, new):
            return times
    raise emit.refuse(f"an upsampling of {old} to {new}, which is no whole multiple")
