"""An index that takes all rows in their order, for models that expect a tensor of indices, or a mask, in its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

__all__ = ["AllRows"]

_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


@final
class AllRows:
    """What `slice(None)` is to a tensor, with the methods that models call of an index.

    A tensor of indices would have to be sorted to be inverted, and a mask counted: both are lengths by values.
    """

    def to(self, *_args: Any, **_kwargs: Any) -> "AllRows":  # noqa: ANN401 - devices and types
        """The same: it is on every device."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - any function of torch
        """Index with all rows, or invert that index. Raises TypeError for any other use."""
        if func is torch.argsort:
            return args[0]
        if func in _INDEXED:
            tensor, index, *value = args
            plain = tuple(slice(None) if isinstance(part, cls) else part for part in _parts(index))
            return func(tensor, plain, *value)
        raise TypeError(f"{cls.__name__} stands for an index only, and {func} is something else")


def _parts(index: Any) -> tuple[Any, ...]:  # noqa: ANN401 - an index
    return index if isinstance(index, tuple) else (index,)
