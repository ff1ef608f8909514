"""Doing an in-place operation on copies of stored values, and storing what came of it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from t2n_hf.tensor.wrapper import OpaqueTensor, opaque_to_final_tensor

__all__ = ["run_on_copies"]

T = TypeVar("T", bound=OpaqueTensor)


def run_on_copies(
    func: Any,  # noqa: ANN401 - an aten overload
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: type[T],
    copied: Callable[[T], torch.Tensor],
) -> tuple[Any, list[tuple[T, torch.Tensor]]]:
    """Run `func`, which writes to some arguments, with the tensors of `kind` that it writes to replaced by copies.

    `copied` makes a copy, to be written to; opaque tensors that are only read are expanded. Returns the result, in
    which a copy is replaced by its tensor again, and each (tensor, new values): to store them is left to the caller.
    """
    copies: dict[int, tuple[T, torch.Tensor]] = {}

    def writable(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, kind):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = (leaf, copied(leaf))
        return copies[id(leaf)][1]

    def readable(leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, OpaqueTensor):
            return copies[id(leaf)][1] if id(leaf) in copies else opaque_to_final_tensor(leaf)
        return leaf

    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
    positions = list(written.values())
    args = tuple(tree_map(writable, value) if positions[i] else value for i, value in enumerate(args))
    kwargs = {name: tree_map(writable, value) if written[name] else value for name, value in kwargs.items()}
    result = func(*tree_map(readable, args), **tree_map(readable, kwargs))
    originals = {id(values): tensor for tensor, values in copies.values()}
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result), list(copies.values())
