"""What is kept of an opaque tensor that torch takes apart into its parts, e.g. to compile a model."""

# ruff: noqa: ANN401 - a tensor here is an OpaqueTensor, whose class imports this file

from typing import Any

import torch

__all__ = ["FlattenContext"]


class FlattenContext:
    """What `__tensor_flatten__` keeps beside the parts. Equal when class, shape, dtype and name are."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._key = (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.name)

    def rebuild(self, parts: dict[str, torch.Tensor]) -> Any:
        """Make a tensor like the one taken apart over other parts."""
        return self._tensor._rebuild(parts, self._key[2])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlattenContext) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
