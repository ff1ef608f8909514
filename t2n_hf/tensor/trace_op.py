"""`t2n_hf::opaque_tensor_expand`: the operator that a tracer of torch records where an opaque tensor's values are used.

It carries the `id()` of the opaque tensor. `find_opaque_ref_by_py_id` finds the parameter again by it, so that a reader
of the traced graph can write the packed weight in place of values that were made for the trace alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from t2n_hf.errors import ConfigError

__all__ = ["OPAQUE_EXPAND_OP", "is_traced", "traced_values", "untraced"]

OPAQUE_EXPAND_OP: Final = "t2n_hf::opaque_tensor_expand"
_TRACED: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()


@torch.library.custom_op(OPAQUE_EXPAND_OP, mutates_args=())
def _expand(py_id: int) -> torch.Tensor:
    tensor = _TRACED.get(py_id)
    if tensor is None:
        raise ConfigError(
            f"no opaque tensor with id {py_id} was traced in this process, or it is gone: a trace has no values, and "
            "refers to the weights of the model that it was made of"
        )
    values: torch.Tensor = tensor._expanded()
    # What an operator gives must be its own: a pool may hold these very values.
    return values.clone()


def traced_values(tensor: Any) -> torch.Tensor:  # noqa: ANN401 - an OpaqueTensor, whose class imports this file
    """Give the values of the opaque `tensor` through the operator, so that the trace going on holds its id."""
    _TRACED[id(tensor)] = tensor
    values: torch.Tensor = _expand(id(tensor))
    return values


def is_traced() -> bool:
    """Say whether `torch.jit.trace` records what this thread does now."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Do something that a tracer does not see; lengths are plain numbers here, and not values of the trace."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
