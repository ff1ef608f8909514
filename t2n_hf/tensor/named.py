"""NamedTensor: a plain tensor that knows under which name it is exported."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from typing import Any, Final, final

import torch
from torch import nn

from t2n_hf.tensor.updater import ModTensorUpdater
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["NamedTensor", "apply_name_to_tensor_in_module"]

_KEEP_NAME: Final = frozenset(
    {
        torch.Tensor.detach,
        torch.Tensor.clone,
        torch.Tensor.contiguous,
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.float,
        torch.Tensor.double,
        torch.clone,
        torch.detach,
    }
)


@final
class NamedTensor(torch.Tensor):
    """Tensor enriched with name attribute.

    It shares its memory with `fp_tensor`. Copies of the whole tensor (`detach`, `clone`, `to`, `data`, `deepcopy`) keep
    `nnef_name`; all else gives plain tensors.
    """

    nnef_name: str
    _is_param: bool

    def __new__(cls, fp_tensor: torch.Tensor, nnef_name: str) -> "NamedTensor":
        """Name `fp_tensor`, a plain tensor or parameter."""
        result = torch.Tensor._make_subclass(cls, fp_tensor.detach(), fp_tensor.requires_grad)
        result.nnef_name = nnef_name
        if isinstance(fp_tensor, nn.Parameter):
            result._is_param = True
        return result

    @property
    def data(self) -> "NamedTensor":
        """The same values, detached. Very important to keep access to all special attr of NamedTensor."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> "NamedTensor":
        """Copy values, name, and what makes it a parameter."""
        if id(self) not in memo:
            with torch.no_grad():
                copied = NamedTensor(self.clone(), self.nnef_name).requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        copied_before: NamedTensor = memo[id(self)]
        return copied_before

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NamedTensor({self.nnef_name!r}, {self.as_subclass(torch.Tensor)!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; name the result again when it is a copy of the whole tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            copied = args[0] if args else (kwargs or {}).get("input")
            if func in _KEEP_NAME and isinstance(copied, NamedTensor) and type(result) is torch.Tensor:
                result = result.as_subclass(cls)
                result.nnef_name = copied.nnef_name
            return result


def apply_name_to_tensor_in_module(model: nn.Module) -> None:
    """Transform torch.Tensor or Parameters into NamedTensor.

    Every parameter and buffer of `model` is replaced in place by one named like it (the first name of a tied one; ties
    are kept). Opaque tensors keep their class, and are told the name. Allows to keep variable naming identical to the
    PyTorch one at export time.
    """

    def named(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if isinstance(tensor, OpaqueTensor):
            tensor.name = name
            return tensor
        return tensor if isinstance(tensor, NamedTensor) else NamedTensor(tensor, name)

    ModTensorUpdater(model, add_buffers=True, add_unregistred_tensor=True).update_all(named)
