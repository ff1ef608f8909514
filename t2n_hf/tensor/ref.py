"""OpaqueTensorRef: stands for an opaque parameter while a tracer that needs plain tensors runs.

t2n_hf's own capture does not need it (it swaps parameters for fakes); tracers that run the model do.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from typing import Any, Final, final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from t2n_hf.errors import ConfigError
from t2n_hf.tensor.updater import ModTensorUpdater
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = [
    "OpaqueTensorRef",
    "find_opaque_ref_by_py_id",
    "set_opaque_tensor_in_params_as_ref",
    "trace_tensor_device_for_func",
]

# Views and questions of shape: what they give follows from the shape alone.
_SHAPE_ONLY: Final = frozenset(
    (
        *("T", "H", "mT", "mH", "adjoint", "movedim", "permute", "swapaxes", "swapdims", "t", "transpose"),
        *("as_strided", "flatten", "ravel", "reshape", "squeeze", "unflatten", "unsqueeze", "view", "view_as"),
        *("broadcast_to", "chunk", "diagonal", "expand", "expand_as", "narrow", "select", "split", "tensor_split"),
        *("unbind", "unfold", "device", "dim", "dtype", "layout", "ndim", "ndimension", "nelement", "numel"),
        *("requires_grad", "shape", "size", "stride"),
    )
)
# What reads values to decide which ones to give, or hands them to Python.
_VALUES: Final = frozenset(
    (
        *("__getitem__", "embedding", "gather", "index_select", "nonzero", "take"),
        *("__array__", "__bool__", "__float__", "__int__", "item", "numpy", "tolist"),
    )
)


def _name_of(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func.overloadpacket.__name__
    name = getattr(func, "__name__", str(func))
    # A property is seen as the getter of its descriptor: torch.Tensor.T.__get__.
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def trace_tensor_device_for_func(func: Any) -> str | None:
    """Say which device an opaque parameter can be traced on for this op.

    "meta" keeps shape and dtype without materializing the backing data; "cpu" forces real decompressed values; None
    falls back to `to_base_tensor()` (also real values, on the tensor's own device). A "meta" op gives a meta tensor:
    no values and no real device. A model that reads values of it, or combines it with a real tensor in another op,
    cannot be traced this way.
    """
    name = _name_of(func)
    if name in _SHAPE_ONLY:
        return "meta"
    return "cpu" if name in _VALUES else None


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
        device = trace_tensor_device_for_func(func)

        def stand_in(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            opaque = value.opaque_tensor
            return opaque.to_base_tensor() if device is None else opaque.to_trace_tensor(device)

        return func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs or {}))


def set_opaque_tensor_in_params_as_ref(model: nn.Module) -> None:
    """Transform OpaqueTensor Parameters into OpaqueTensorRef, in place; ties are kept.

    This is for a tracer that runs the model: apply it just before, and to a copy if the model is needed afterwards.
    """

    def referred(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not isinstance(tensor, OpaqueTensor):
            return tensor
        return OpaqueTensorRef(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)

    ModTensorUpdater(model).update_all(referred)


def find_opaque_ref_by_py_id(module: nn.Module, py_id: int) -> OpaqueTensorRef:
    """Allow to fetch back the opaque parameter once passed the jit 'wall'.

    `py_id` is the `id()` of the reference or of the opaque tensor behind it. Raises ConfigError when no parameter or
    buffer of `module` has it.
    """
    for tensor, _ in ModTensorUpdater(module):
        if isinstance(tensor, OpaqueTensorRef) and py_id in (id(tensor), id(tensor.opaque_tensor)):
            return tensor
    raise ConfigError(f"no OpaqueTensorRef with id {py_id} among the parameters and buffers of {type(module).__name__}")
