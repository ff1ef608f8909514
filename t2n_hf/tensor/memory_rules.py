"""What asks for a tensor's own memory, below torch's operators: an opaque tensor has none, and a null pointer follows.

Readers get the values, and cannot write to them; writers write through the tensor, so that it persists or is refused.
"""
# ruff: noqa: ANN401 - a tensor here is an OpaqueTensor, whose class imports this file

from collections.abc import Callable
from typing import Any, Final

import torch

from t2n_hf.tensor.fallback import materialise

__all__ = ["MEMORY_RULES"]


def _values(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: method(materialise(tensor, method.__name__), *args, **kwargs)


def _array(method: Callable[..., Any]) -> Callable[..., Any]:
    def read_only(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        array = method(materialise(tensor, method.__name__), *args, **kwargs)
        # It may be the memory of a pool's value, and what is written there would be gone with that.
        array.flags.writeable = False
        return array

    return read_only


def _exported(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    # DLPack can say that memory is read-only, but few that read it ask: they get a copy.
    return materialise(tensor, "__dlpack__").clone().__dlpack__(*args, **kwargs)


def _formatted(tensor: Any, spec: str) -> str:
    return format(tensor.item(), spec) if not tensor.ndim else object.__format__(tensor, spec)


def _share_memory(tensor: Any) -> Any:
    for part in tensor._parts().values():
        part.share_memory_()
    return tensor


def _apply(tensor: Any, function: Callable[[Any], Any]) -> Any:
    return tensor.copy_(materialise(tensor, "apply_").clone().apply_(function))


def _fill_diagonal(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    # torch takes it apart into a view and a write to that, which would be lost.
    return tensor._write(torch.ops.aten.fill_diagonal_.default, (tensor, *args), kwargs)


MEMORY_RULES: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.tolist: _values(torch.Tensor.tolist),
    torch.Tensor.numpy: _array(torch.Tensor.numpy),
    torch.Tensor.__array__: _array(torch.Tensor.__array__),
    torch.Tensor.__dlpack__: _exported,
    torch.Tensor.__format__: _formatted,
    torch.Tensor.share_memory_: _share_memory,
    torch.Tensor.apply_: _apply,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
}
