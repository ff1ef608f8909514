"""Stand-ins of results of a few operators, made without the operators that torch takes them apart into.

torch asks of a linear layer on stand-ins what a view, a product of matrices and another view give, each with the
conditions on its lengths: milliseconds, of which a model has many. Where arguments show at once what comes of it, in
that no condition on a length is needed, it is made here; torch sees to everything else. Called with what torch's
function modes see switched off.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

__all__ = ["quick_result"]

_aten: Final = torch.ops.aten


def quick_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """What `func` gives, as torch would make it: shape, dtype and order in memory; None for what torch has to see."""
    rule = None if kwargs else _RULES.get(func)
    return None if rule is None else rule(*args)


def _linear(x: Any, weight: Any, bias: Any = None) -> FakeTensor | None:
    tensors = [one for one in (x, weight, bias) if one is not None]
    if not _alike(tensors) or x.dim() < 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None
    rows, columns = weight.shape
    if not _same(x.shape[-1], columns) or (bias is not None and not _same(bias.shape[0], rows)):
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


def _made(like: FakeTensor, shape: Sequence[Any]) -> FakeTensor:
    """A new stand-in of this shape, in order."""
    with in_kernel_invocation_manager(like.fake_mode):
        meta = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
    return FakeTensor(like.fake_mode, meta, like.fake_device)


_RULES: Final[Mapping[Any, Callable[..., FakeTensor | None]]] = {
    _aten.linear.default: _linear,
    _aten.layer_norm.default: _layer_norm,
    _aten.pow.Tensor_Scalar: _pointwise,
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
