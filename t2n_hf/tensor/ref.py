"""OpaqueTensorRef: stands for an opaque parameter while a tracer that needs plain tensors runs.

t2n_hf's own capture does not need it (it swaps parameters for fakes); tracers that run the model do.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from t2n_hf.errors import ConfigError, InPlaceError
from t2n_hf.tensor.fallback import written_by
from t2n_hf.tensor.trace_op import untraced
from t2n_hf.tensor.traced_view import QUESTIONS, TracedView, name_of, postponed, trace_tensor_device_for_func
from t2n_hf.tensor.updater import ModTensorUpdater
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = [
    "OpaqueTensorRef",
    "find_opaque_ref_by_py_id",
    "set_opaque_tensor_in_params_as_ref",
    "trace_tensor_device_for_func",
]


@final
class OpaqueTensorRef(torch.Tensor):
    """Allow to pass through 'tracing'.

    `meta_tensor` gives shape and dtype; the values come from `opaque_tensor`, for the operations that need them.
    """

    opaque_tensor: OpaqueTensor
    _is_param: bool

    def __new__(cls, meta_tensor: torch.Tensor, opaque_tensor: OpaqueTensor) -> "OpaqueTensorRef":
        """Refer to `opaque_tensor`. Raises ConfigError when the two differ in shape or dtype."""
        mine, other = (meta_tensor.shape, meta_tensor.dtype), (opaque_tensor.shape, opaque_tensor.dtype)
        if not meta_tensor.is_meta or mine != other:
            raise ConfigError(f"expected a meta tensor of shape and dtype {other}, got {mine} on {meta_tensor.device}")
        result = torch.Tensor._make_subclass(cls, meta_tensor.detach(), False)
        result.opaque_tensor = opaque_tensor
        return result

    @property
    def meta_tensor(self) -> torch.Tensor:
        """Shape and dtype, as a plain meta tensor."""
        with untraced():
            return self.as_subclass(torch.Tensor)

    @property
    def nnef_name(self) -> str:
        """The name of the opaque tensor."""
        return self.opaque_tensor.name

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpaqueTensorRef":
        """Refer to a copy of the opaque tensor."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
            copied = OpaqueTensorRef(meta, self.opaque_tensor.__deepcopy__(memo))
            if isinstance(self, nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        copied_before: OpaqueTensorRef = memo[id(self)]
        return copied_before

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OpaqueTensorRef({self.opaque_tensor!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on what `trace_tensor_device_for_func` says: the shape, or the values."""
        kwargs, device = kwargs or {}, trace_tensor_device_for_func(func)
        leaves = tree_leaves((args, kwargs))
        opaque = next(leaf.opaque_tensor for leaf in leaves if isinstance(leaf, cls))
        if name_of(func) in QUESTIONS:
            with untraced():
                return func(*tree_map(_opaque, args), **tree_map(_opaque, kwargs))
        written = next((leaf for leaf in written_by(func, args, kwargs) if isinstance(leaf, cls)), None)
        if written is not None:
            name = _described(written.opaque_tensor)
            raise InPlaceError(
                f"{name_of(func)} would write to a reference to {name}, which stands for it while a model is traced; "
                "change the model's own parameter, before it is replaced by a reference"
            )
        # Whole numbers are there to be read: as indices, as sizes.
        if device == "meta" and opaque.is_floating_point():
            if not isinstance(args[0], cls):
                return func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
            if func is not torch.Tensor.__getitem__ or not any(_is_index(leaf) for leaf in leaves):
                return postponed(func, args, kwargs, _described(opaque), _bare, _values)
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def _described(opaque: OpaqueTensor) -> str:
    with untraced():
        return f"{opaque.name or 'an unnamed tensor'} ({type(opaque).__name__} of shape {tuple(opaque.shape)})"


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, OpaqueTensorRef)


def _opaque(value: Any) -> Any:
    return value.opaque_tensor if isinstance(value, OpaqueTensorRef) else value


def _bare(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, (OpaqueTensorRef, TracedView)) else value


def _values(value: Any) -> Any:
    if isinstance(value, OpaqueTensorRef):
        return value.opaque_tensor.to_base_tensor()
    return value.values() if isinstance(value, TracedView) else value


def set_opaque_tensor_in_params_as_ref(model: nn.Module) -> None:
    """Transform OpaqueTensor Parameters into OpaqueTensorRef, in place; ties are kept.

    This is for a tracer that runs the model: apply it just before, and to a copy if the model is needed afterwards.
    """

    def referred(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not isinstance(tensor, OpaqueTensor):
            return tensor
        tensor.name = tensor.name or name
        return OpaqueTensorRef(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)

    ModTensorUpdater(model, add_buffers=True).update_all(referred)


def find_opaque_ref_by_py_id(module: nn.Module, py_id: int) -> OpaqueTensorRef:
    """Allow to fetch back the opaque parameter once passed the jit 'wall'.

    `py_id` is the `id()` of the opaque tensor behind the reference, which the operator `t2n_hf::opaque_tensor_expand`
    of a traced graph carries; that of the reference will do too. Raises ConfigError when no parameter or buffer of
    `module` has it.
    """
    for tensor, _ in ModTensorUpdater(module, add_buffers=True):
        if isinstance(tensor, OpaqueTensorRef) and py_id in (id(tensor), id(tensor.opaque_tensor)):
            return tensor
    raise ConfigError(f"no OpaqueTensorRef with id {py_id} among the parameters and buffers of {type(module).__name__}")
