"""Lengths that a module holds in tensors without axes, seen as the lengths they are while it is captured.

`torch.tensor(x.shape[1])` or `torch.div(x.shape[1], 8, rounding_mode="trunc")` makes a tensor whose value a trace no
longer knows: a slice or a view by it would be by a length that depends on data. Here the value is remembered beside the
tensor, through integer arithmetic, and given in its place where a length is wanted.
"""

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["TensorLengthsKept"]

_ARITHMETIC: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.__add__: operator.add,
    torch.Tensor.__radd__: lambda a, b: b + a,
    torch.Tensor.__sub__: operator.sub,
    torch.Tensor.__rsub__: lambda a, b: b - a,
    torch.Tensor.__mul__: operator.mul,
    torch.Tensor.__rmul__: lambda a, b: b * a,
    torch.Tensor.add: operator.add,
    torch.Tensor.sub: operator.sub,
    torch.Tensor.mul: operator.mul,
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
    torch.Tensor.__neg__: operator.neg,
    torch.Tensor.neg: operator.neg,
}
_MAKERS: Final = (torch.tensor, torch.scalar_tensor)  # the second is what torch.export makes of the first
_DIVISIONS: Final = (torch.div, torch.Tensor.div)
_COPIES: Final = (
    torch.Tensor.to,
    torch.Tensor.long,
    torch.Tensor.int,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.detach_,
)
# Calls whose further arguments are lengths, or may be.
_SHAPED: Final = (
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.expand,
    torch.Tensor.repeat,
    torch.Tensor.narrow,
    torch.Tensor.clamp,
    torch.clamp,
)
_WHOLE: Final = (torch.int64, torch.int32)


class TensorLengthsKept(TorchFunctionMode):
    """Inside of it, lengths in tensors without axes are lengths where a slice, a shape or a number is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}  # the tensor too: its id is its own as long as it lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the call with lengths in the place of the tensors that hold them, and remember a length that it makes."""
        kwargs = kwargs or {}
        if func is torch.Tensor.item and self._is_known(args[0]):
            return self._value(args[0])
        if self._known:
            args = self._with_lengths(func, args)
        result = func(*args, **kwargs)
        value = self._length_made(func, args, kwargs) if _may_hold_length(result) else None
        if value is not None:
            self._known[id(result)] = (result, value)
        return result

    def _is_known(self, value: object) -> bool:
        return id(value) in self._known

    def _value(self, value: Any) -> Any:  # noqa: ANN401 - a tensor, or a length
        return self._known[id(value)][1] if self._is_known(value) else value

    def _with_lengths(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
        if func is torch.Tensor.__getitem__:
            place = args[1]
            parts = tuple(self._sliced(p) for p in place) if isinstance(place, tuple) else self._sliced(place)
            return (args[0], parts)
        if func in _SHAPED:
            args = (args[0], *map(self._value, args[1:]))
        return tuple(self._shape(arg) if isinstance(arg, tuple | list) else arg for arg in args)

    def _shape(self, sizes: Any) -> Any:  # noqa: ANN401 - a tuple or list
        """A list of lengths, some of which may be in tensors; a list of tensors is none."""
        mixed = any(isinstance(size, int | torch.SymInt) for size in sizes) and any(map(self._is_known, sizes))
        return [self._value(size) for size in sizes] if mixed else sizes

    def _sliced(self, part: Any) -> Any:  # noqa: ANN401 - any index
        if not isinstance(part, slice):
            return part
        return slice(self._value(part.start), self._value(part.stop), self._value(part.step))

    def _length_made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """The value of the result, or None when it is not known."""
        if func in _MAKERS:
            return args[0] if args and isinstance(args[0], int | torch.SymInt) else None
        values = [self._value(arg) for arg in args]
        if func in _COPIES:
            return values[0] if self._is_known(args[0]) else None
        if kwargs.keys() - {"rounding_mode"} or not all(isinstance(value, int | torch.SymInt) for value in values):
            return None
        if func in _DIVISIONS:
            by = values[1]
            # Both ways of rounding are the same for a length, which is not negative.
            rounded = kwargs.get("rounding_mode") in ("trunc", "floor")
            return values[0] // by if rounded and isinstance(by, int) and by > 0 else None
        return _ARITHMETIC[func](*values) if func in _ARITHMETIC else None


def _may_hold_length(result: object) -> bool:
    return isinstance(result, torch.Tensor) and result.dim() == 0 and result.dtype in _WHOLE
