"""Greatest elements and means of windows: of a size, or as many as asked; they may reach over the end."""

import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import sympy
import torch

from t2n_hf.nnef.versions import PADDED_BOX_SINCE
from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value
from t2n_hf.ops.windows import along, batched, each, unbatched, window_count

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits
_I64: Final = torch.int64


class _Windows:
    """Windows along the last axes of [N, C, ...].

    Attributes:
        x: what is pooled, with a batch axis.
        after: what is put after each axis so that there are as many windows as torch has.
        lengths: how many windows there are with that; more than wanted where lengths are free.
    """

    def __init__(  # noqa: PLR0917 - what a pooling is
        self,
        emit: Emit,
        x: Value,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] | None,
        padding: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> None:
        count = _axes_of(emit)
        self.emit, self.x = emit, batched(emit, x, count + 2)
        self.kernel = each(kernel, count)
        self.stride = each(stride, count) if stride else self.kernel
        self.padding, self.dilation = each(padding, count), each(dilation, count)
        self.wanted = emit.shape[len(emit.shape) - count :]
        self.after = [self._after(place, ceil_mode) for place in range(count)]
        sizes = zip(self.x.shape[2:], self.padding, self.after, self._spans(), self.stride, strict=True)
        self.lengths = [window_count(n + p + after, span, step) for n, p, after, span, step in sizes]

    def _spans(self) -> list[int]:
        return [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]

    def _after(self, place: int, ceil_mode: bool) -> int:
        padding, step = self.padding[place], self.stride[place]
        if not ceil_mode:
            return padding
        length, wanted = self.x.shape[2 + place], self.wanted[place]
        if isinstance(length, int) and isinstance(wanted, int):
            return max((wanted - 1) * step + self._spans()[place] - length - padding, padding)
        return padding + step - 1

    @property
    def reach_over(self) -> bool:
        """Whether windows may reach over what is there and its padding."""
        return self.after != self.padding

    def call(self, op: str, outs: Sequence[torch.dtype], **options: Any) -> list[Value]:  # noqa: ANN401
        """`op` over the windows. tract wants their sizes for all axes, and a fixed number of channels."""
        x = self.x
        free = not isinstance(x.shape[1], int)
        source = self.emit.reshape(x, (x.shape[0] * x.shape[1], 1, *x.shape[2:])) if free else x
        amounts = [(0, 0), (0, 0), *zip(self.padding, self.after, strict=True)]
        if op == "box" and options["border"] == "constant" and not self.emit.options.reaches(PADDED_BOX_SINCE):
            source, amounts = self._padded(source, amounts), [(0, 0)] * len(amounts)
        shape = (*source.shape[:2], *self.lengths)
        results = self.emit.call_many(
            op,
            source,
            outs=[(shape, dtype) for dtype in outs],
            size=[1, 1, *self.kernel],
            stride=[1, 1, *self.stride],
            padding=amounts,
            dilation=[1, 1, *self.dilation],
            **options,
        )
        return [self._cut(self.emit.reshape(result, (*x.shape[:2], *self.lengths))) for result in results]

    def _padded(self, source: Value, amounts: list[tuple[int, int]]) -> Value:
        """The tensor with zeros around it, for versions of tract that leave padding out of sums and means."""
        if not any(map(any, amounts)):
            return source
        shape = [n + before + after for n, (before, after) in zip(source.shape, amounts, strict=True)]
        out = (shape, source.dtype)
        return self.emit.call("pad", source, out=out, padding=amounts, border="constant", value=0.0)

    def _cut(self, result: Value) -> Value:
        for axis, (length, wanted) in enumerate(zip(self.lengths, self.wanted, strict=True), start=2):
            if self.reach_over and not same(length, wanted):
                result = self.emit.slice(result, axis, 0, wanted)
        return result

    def count(self, place: int, include_pad: bool) -> Operand:
        """How many elements each window along an axis has: those that are there, and the padding if it counts."""
        emit, length, padding = self.emit, self.x.shape[2 + place], self.padding[place]
        if include_pad and self.after[place] == padding:
            return float(self.kernel[place])
        begin = emit.binary("mul", emit.range(0, self.wanted[place], _I64), self.stride[place], _I64)
        begin = emit.binary("sub", begin, padding, _I64)
        end = emit.binary("add", begin, self.kernel[place], _I64)
        end = emit.binary("min", end, length + padding if include_pad else length, _I64)
        if not include_pad:
            begin = emit.binary("max", begin, 0, _I64)
        counts = emit.cast(emit.binary("sub", end, begin, _I64), self.x.dtype)
        rest = [axis for axis in range(self.x.rank) if axis != 2 + place]
        return emit.unsqueeze(counts, rest)


def _axes_of(emit: Emit) -> int:
    """Number of axes that the node's operator pools, which its name tells: max_pool2d has two."""
    return next(int(character) for character in str(emit.node.target).split(".")[1] if character.isdigit())


# Greatest elements

_MAX: Final = (_aten.max_pool1d.default, _aten.max_pool2d.default, _aten.max_pool3d.default)
_MAX_INDEXED: Final = (
    _aten.max_pool1d_with_indices.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
)


@_emits(*_MAX)
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
    windows = _Windows(emit, x, kernel_size, stride, padding, dilation, ceil_mode)
    return unbatched(emit, windows.call("max_pool", [x.dtype], border="ignore")[0])


@_emits(*_MAX_INDEXED)
def max_pool_with_indices(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    x: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> list[Value]:
    """Greatest element of each window, and its place among the elements of the channel."""
    windows = _Windows(emit, x, kernel_size, stride, padding, dilation, ceil_mode)
    return [unbatched(emit, y) for y in windows.call("max_pool_with_index", [x.dtype, _I64], border="ignore")]


# Means


@_emits(_aten.avg_pool1d.default, _aten.avg_pool2d.default, _aten.avg_pool3d.default)
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
    """Mean of each window, or its sum over `divisor_override`."""
    _refuse_ints(emit, x)
    windows = _Windows(emit, x, kernel_size, stride, padding, 1, ceil_mode)
    if not windows.reach_over and divisor_override is None:
        border = "constant" if count_include_pad else "ignore"
        return unbatched(emit, windows.call("box", [x.dtype], border=border, normalize=True)[0])
    sums = windows.call("box", [x.dtype], border="constant", normalize=False)[0]
    if divisor_override is not None:
        return unbatched(emit, emit.binary("div", sums, float(divisor_override), x.dtype))
    for place in range(len(windows.kernel)):
        sums = emit.binary("div", sums, windows.count(place, count_include_pad), x.dtype)
    return unbatched(emit, sums)


def _refuse_ints(emit: Emit, x: Value) -> None:
    if not x.dtype.is_floating_point:
        raise emit.refuse(f"a mean of {x.dtype}; cast to a float type before")


# As many windows as asked

_AVERAGES: Final = (
    *(_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default, _aten.adaptive_avg_pool3d.default),
    *(_aten._adaptive_avg_pool2d.default, _aten._adaptive_avg_pool3d.default),
)


def _divided(lengths: Sequence[Length], sizes: Sequence[Length]) -> list[int] | None:
    """Lengths of windows that divide all axes without a rest; None when there are none such."""
    quotients = [sympy.simplify(sympy.sympify(n) / size) for n, size in zip(lengths, sizes, strict=True)]
    return [int(quotient) for quotient in quotients] if all(q.is_Integer for q in quotients) else None


@_emits(*_AVERAGES)
def adaptive_avg_pool(emit: Emit, x: Value, _sizes: object) -> Value:
    """Mean of as many windows as asked."""
    _refuse_ints(emit, x)
    count = _axes_of(emit)
    axes = list(range(x.rank - count, x.rank))
    sizes = emit.shape[-count:]
    if all(size == 1 for size in sizes):
        return emit.reduce("mean_reduce", x, axes, keepdim=True)
    kernel = _divided([x.shape[axis] for axis in axes], sizes)
    if kernel is not None:
        windows = _Windows(emit, x, kernel, kernel, 0)
        return unbatched(emit, windows.call("box", [x.dtype], border="constant", normalize=True)[0])
    for axis, size in zip(axes, sizes, strict=True):
        if not same(x.shape[axis], size):
            x = along(emit, x, _means(emit, x.shape[axis], size, x.dtype), axis)
    return x


def _members(emit: Emit, length: Length, size: Length) -> Value:
    """Which elements [length] belong to each of `size` windows: from i * length / size on, rounded outwards."""
    rows = emit.unsqueeze(emit.range(0, size, _I64), [1])
    begin = emit.binary("div", emit.binary("mul", rows, length, _I64), size, _I64)
    end = emit.binary("mul", emit.binary("add", rows, 1, _I64), length, _I64)
    end = emit.binary("div", emit.binary("add", end, size - 1, _I64), size, _I64)
    places = emit.unsqueeze(emit.range(0, length, _I64), [0])
    outside = emit.binary("gt", begin, places, _I64, torch.bool)
    before_end = emit.binary("gt", end, places, _I64, torch.bool)
    inside = emit.unary("not", outside)
    return emit.call("and", inside, before_end, out=((size, length), torch.bool))


def _means(emit: Emit, length: Length, size: Length, dtype: torch.dtype) -> Value:
    """The matrix [size, length] that takes the mean of each window."""
    members = emit.cast(_members(emit, length, size), dtype)
    return emit.binary("div", members, emit.reduce("sum_reduce", members, [1], keepdim=True), dtype)


@_emits(_aten.adaptive_max_pool1d.default, _aten.adaptive_max_pool2d.default, _aten.adaptive_max_pool3d.default)
def adaptive_max_pool(emit: Emit, x: Value, _sizes: object) -> list[Value | None]:
    """Greatest element of as many windows as asked, and its place among the elements of the channel."""
    count = _axes_of(emit)
    sizes = emit.shape[-count:]
    kernel = _divided(x.shape[-count:], sizes)
    if kernel is not None:
        windows = _Windows(emit, x, kernel, kernel, 0)
        return [unbatched(emit, y) for y in windows.call("max_pool_with_index", [x.dtype, _I64], border="ignore")]
    if any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in emit.node.users):
        raise emit.refuse(f"the indices of an adaptive max pooling of {x.shape[-count:]} to {sizes}, no parts of it")
    for axis in range(x.rank - count, x.rank):
        if not same(x.shape[axis], emit.shape[axis]):
            x = _greatest(emit, x, axis, emit.shape[axis])
    return [x, None]


def _greatest(emit: Emit, x: Value, axis: int, size: Length) -> Value:
    members = _members(emit, x.shape[axis], size)
    members = emit.unsqueeze(members, [place for place in range(x.rank + 1) if place not in {axis, axis + 1}])
    least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    candidates = emit.select(members, emit.unsqueeze(x, [axis]), least, x.dtype)
    return emit.reduce("max_reduce", candidates, [axis + 1], keepdim=False)
