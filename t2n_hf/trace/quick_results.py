"""Stand-ins of results of a few operators, made without the operators that torch takes them apart into.

torch asks of a linear layer on stand-ins what a view, a product of matrices and another view give, each with the
conditions on its lengths: milliseconds, of which a model has many. Where arguments show at once what comes of it, in
that no condition on a length is needed, it is made here; torch sees to everything else. Called with what torch's
function modes see switched off.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

__all__ = ["quick_result", "stand_in"]

_aten: Final = torch.ops.aten


def quick_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """What `func` gives, as torch would make it: shape, dtype and order in memory; None for what torch has to see."""
    rule = None if kwargs else _RULES.get(func)
    return None if rule is None else rule(*args)


def stand_in(tensor: FakeTensor, mode: FakeTensorMode) -> FakeTensor:
    """A stand-in of another trace as one of `mode`, in order; its lengths are numbers."""
    with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(mode):
        meta = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, meta, tensor.fake_device)


def _linear(x: Any, weight: Any, bias: Any = None) -> FakeTensor | None:
    tensors = [one for one in (x, weight, bias) if one is not None]
    if not _alike(tensors) or x.dim() < 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None
    rows, columns = weight.shape
    # Of a length that might be 0 torch's steps say so in its own way.
    if (
        not isinstance(rows, int)
        or not _same(x.shape[-1], columns)
        or (bias is not None and not _same(bias.shape[0], rows))
    ):
        return None
    return _made(x, (*x.shape[:-1], rows))


def _pointwise(x: Any, *numbers: Any) -> FakeTensor | None:
    plain = all(type(number) in (int, float) for number in numbers)
    return _made(x, x.shape) if plain and _alike([x]) and _is_in_order(x) else None


def _activation(x: Any) -> FakeTensor | None:
    return _pointwise(x)


def _pairwise(x: Any, y: Any) -> FakeTensor | None:
    if type(y) in (int, float):
        return _pointwise(x)
    if not _alike([x, y]) or not (_is_in_order(x) and _is_in_order(y)):
        return None
    large, small = (x, y) if x.dim() >= y.dim() else (y, x)
    pairs = list(zip(reversed(large.shape), reversed(small.shape), strict=False))
    # Each length of the result is that of the larger one, or of none: which of two it is may be a condition.
    if not all(_same(a, b) or _same(b, 1) for a, b in pairs):
        return None
    return _made(large, large.shape)


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, *rest: Any) -> FakeTensor | None:
    tensors = [one for one in (x, weight, bias) if one is not None]
    if not _alike(tensors) or not _is_in_order(x) or len(shape) > x.dim():
        return None
    inner = x.shape[x.dim() - len(shape) :]
    fit = all(_same(a, b) for one in (shape, *(t.shape for t in tensors[1:])) for a, b in zip(inner, one, strict=False))
    return _made(x, x.shape) if fit and all(t.dim() == len(shape) for t in tensors[1:]) else None


def _mean(x: Any, axes: Any = None, keepdim: bool = False) -> FakeTensor | None:
    if not keepdim or not isinstance(axes, list | tuple) or not _alike([x]) or not _is_in_order(x):
        return None
    if x.dim() == 0 or list(axes) not in ([-1], [x.dim() - 1]):
        return None
    return _made(x, (*x.shape[:-1], 1))


def _view(x: Any, shape: Any) -> FakeTensor | None:
    if type(x) is not FakeTensor or not _is_in_order(x):
        return None
    sizes = _sizes_of_view(x.shape, list(shape))
    return None if sizes is None else _seen(x, sizes, _steps(sizes))


def _sizes_of_view(old: Sequence[Any], new: list[Any]) -> list[Any] | None:
    """The lengths of a view with its -1 filled in; None where a length would have to be divided by one of no number."""
    rest = [length for length in old if isinstance(length, torch.SymInt)]
    number = math.prod(length for length in old if not isinstance(length, torch.SymInt))
    for length in new:
        if isinstance(length, torch.SymInt):
            place = next((at for at, other in enumerate(rest) if _same(length, other)), None)
            if place is None:
                return None
            del rest[place]
    parts = [length for length in new if not isinstance(length, torch.SymInt)]
    known = math.prod(length for length in parts if length != -1)
    if -1 not in parts:
        return new if not rest and number == known else None
    if known <= 0 or number % known or len(rest) > 1 or parts.count(-1) > 1:
        return None
    times = number // known
    missing = times if not rest else rest[0] if times == 1 else rest[0] * times
    return [missing if type(length) is int and length == -1 else length for length in new]


def _steps(sizes: Sequence[Any]) -> list[Any]:
    steps: list[Any] = [1]
    for length in reversed(sizes[1:]):
        steps.insert(0, steps[0] * length)
    return steps[: len(sizes)]


def _unsqueeze(x: Any, axis: Any) -> FakeTensor | None:
    if type(x) is not FakeTensor:
        return None
    sizes, steps = list(x.shape), list(x.stride())
    at = axis + len(sizes) + 1 if axis < 0 else axis
    if not 0 <= at <= len(sizes):
        return None
    step = sizes[at] * steps[at] if at < len(sizes) else 1
    return _seen(x, [*sizes[:at], 1, *sizes[at:]], [*steps[:at], step, *steps[at:]])


def _transpose(x: Any, one: Any, other: Any) -> FakeTensor | None:
    if type(x) is not FakeTensor or not all(-x.dim() <= axis < x.dim() for axis in (one, other)):
        return None
    sizes, steps = list(x.shape), list(x.stride())
    for values in (sizes, steps):
        values[one], values[other] = values[other], values[one]
    return _seen(x, sizes, steps)


def _cat(tensors: Any, axis: Any = 0) -> FakeTensor | None:
    if not tensors or not _alike(tensors):
        return None
    first = tensors[0]
    if not all(one.dim() == first.dim() and _is_row_major(one) for one in tensors):
        return None
    if first.dim() < 2 or not -first.dim() <= axis < first.dim():
        return None
    at = axis % first.dim()
    for one in tensors[1:]:
        if not all(_same(a, b) for place, (a, b) in enumerate(zip(one.shape, first.shape, strict=True)) if place != at):
            return None
    total = sum((one.shape[at] for one in tensors[1:]), start=first.shape[at])
    return _made(first, (*first.shape[:at], total, *first.shape[at + 1 :]))


def _is_row_major(x: torch.Tensor) -> bool:
    """Whether the last axis is the innermost one in memory, so that torch joins into memory in order."""
    last = x.shape[-1]
    return type(last) is int and last > 1 and _same(x.stride(-1), 1) and not any(_same(s, 1) for s in x.stride()[:-1])


def _alike(tensors: Sequence[Any]) -> bool:
    """Whether all are stand-ins of one kind of floating numbers on one device, with a plain memory."""
    if not all(type(one) is FakeTensor for one in tensors):
        return False
    first = tensors[0]
    return first.dtype.is_floating_point and all(
        one.dtype is first.dtype and one.fake_device == first.fake_device and one.fake_mode is first.fake_mode
        for one in tensors
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two lengths are equal at any size of the inputs."""
    return _size(a) == _size(b)


def _size(length: Any) -> Any:
    """A length as a number or an expression."""
    return length.node.expr if isinstance(length, torch.SymInt) else length


def _is_in_order(x: torch.Tensor) -> bool:
    """Whether values lie in memory one behind the other at any size."""
    expected: Any = 1
    for length, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if _size(step) != expected:
            return False
        expected = expected * _size(length)
    return True


def _seen(x: FakeTensor, sizes: Sequence[Any], steps: Sequence[Any]) -> FakeTensor:
    """A view of a stand-in."""
    with in_kernel_invocation_manager(x.fake_mode):
        meta = x.as_strided(sizes, steps)
    return FakeTensor(x.fake_mode, meta, x.fake_device)


def _made(like: FakeTensor, shape: Sequence[Any]) -> FakeTensor:
    """A new stand-in of this shape, in order."""
    with in_kernel_invocation_manager(like.fake_mode):
        meta = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
    return FakeTensor(like.fake_mode, meta, like.fake_device)


_RULES: Final[Mapping[Any, Callable[..., FakeTensor | None]]] = {
    _aten.linear.default: _linear,
    _aten.layer_norm.default: _layer_norm,
    _aten.pow.Tensor_Scalar: _pointwise,
    _aten.mean.dim: _mean,
    _aten.view.default: _view,
    _aten.reshape.default: _view,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.transpose.int: _transpose,
    _aten.cat.default: _cat,
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _pairwise),
    **dict.fromkeys(
        (
            _aten.rsqrt.default,
            _aten.neg.default,
            _aten.cos.default,
            _aten.sin.default,
            _aten.tanh.default,
            _aten.sigmoid.default,
            _aten.silu.default,
            _aten.gelu.default,
            _aten.relu.default,
            _aten.exp.default,
        ),
        _activation,
    ),
}
