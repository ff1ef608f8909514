"""What opaque tensors do with aten operators that keep their class or need no values: detach, clone, to, equal, ...

Each rule takes the operator's own arguments, of which the first is an opaque tensor (the class imports this file).
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from t2n_hf.tensor.fallback import materialise

__all__ = ["ATEN_RULES", "gives_view", "written_arguments"]

aten = torch.ops.aten


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Give the tensors that the aten overload `func` would write to, by its schema."""
    if not func._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tree_leaves(value)
    return written


def gives_view(func: Any) -> bool:
    """Say whether the results of the aten overload `func` share memory with its arguments."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _alias(tensor: Any, **_: Any) -> Any:
    return _named(tensor._alias(), tensor)


def _clone(tensor: Any, **_: Any) -> Any:
    return _named(tensor._copy(), tensor)


def _named(result: Any, tensor: Any) -> Any:
    result._name = tensor._name
    return result


def _to_copy(tensor: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return materialise(tensor, f"to({dtype})").to(dtype=dtype, device=device)
    result = tensor
    if device is not None and torch.device(device) != tensor.device:
        result = result._to_device(torch.device(device))
    if dtype is not None and dtype != result.dtype:
        result = result._with_dtype(dtype)
    return _named(tensor._copy() if result is tensor else result, tensor)


def _equal(left: Any, right: Any) -> bool:
    if type(left) is type(right) and left.shape == right.shape and left.dtype == right.dtype:
        ours, theirs = left._parts(), right._parts()
        if ours and ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours):
            return True
    other = materialise(right, "equal") if hasattr(right, "to_base_tensor") else right
    return torch.equal(materialise(left, "equal"), other)


def _shape_only(func: Any) -> Callable[..., torch.Tensor]:
    def made(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        stand_in = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return func(stand_in, *args, **kwargs)

    return made


_SHAPE_ONLY: Final = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default),
    *(aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default),
)
ATEN_RULES: Final[dict[Any, Callable[..., Any]]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.equal.default: _equal,
    aten.is_pinned.default: lambda tensor, device=None: False,
    **{func: _shape_only(func) for func in _SHAPE_ONLY},
}
