"""OpaqueTensor: a tensor that has a shape, a dtype and a device, and keeps its values in another form.

To the code that uses it, it is a parameter like any other: `F.linear`, `F.embedding`, `w.T`, `w[i]`, `detach`, `to`,
`deepcopy` and `state_dict` work. What a class has a rule for runs on the packed form; everything else goes through
`materialise`, the one place where values become a plain tensor. Nothing that is written to an opaque tensor is lost
silently: it persists, or raises InPlaceError.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, NoReturn

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map
from typing_extensions import Self

from t2n_hf.errors import ConfigError, InPlaceError, UnsupportedOpError
from t2n_hf.tensor.aten_rules import ATEN_RULES, gives_view, written_arguments
from t2n_hf.tensor.autograd import linear_through
from t2n_hf.tensor.fallback import ReadOnlyView, materialise
from t2n_hf.tensor.flatten import FlattenContext
from t2n_hf.tensor.memory_rules import MEMORY_RULES
from t2n_hf.tensor.product import dense_product
from t2n_hf.tensor.trace_op import is_traced, traced_values

__all__ = ["OpaqueTensor", "opaque_to_final_tensor"]

aten = torch.ops.aten
_INDICES: Final = (torch.int64, torch.int32)
_no_torch_function: Final = torch._C.DisableTorchFunctionSubclass


def opaque_to_final_tensor(rtensor: torch.Tensor) -> torch.Tensor:
    """Expand `rtensor` to a plain tensor, through any nesting (an offloaded tensor that holds a quantized one)."""
    while isinstance(rtensor, OpaqueTensor):
        rtensor = rtensor.to_base_tensor()
    return rtensor


def _records_gradients(tensor: torch.Tensor) -> bool:
    # In this order: asking a tensor takes a microsecond, as each attribute goes through __torch_function__.
    return torch.is_grad_enabled() and tensor.requires_grad


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Say whether rows have to be taken by torch itself: for gradients, or because indices may be those of a vmap."""
    return torch._C._are_functorch_transforms_active() or _records_gradients(tensor)


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:
    if not isinstance(weight, OpaqueTensor) or isinstance(input, OpaqueTensor):
        return NotImplemented
    if torch.is_grad_enabled():
        if weight.requires_grad:
            return NotImplemented
        if input.requires_grad or (bias is not None and bias.requires_grad):
            return linear_through(input, weight, bias)
    return weight._linear(input, bias)


def _embedding(
    input: torch.Tensor, weight: Any, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **kw: Any
) -> Any:
    if not isinstance(weight, OpaqueTensor) or input.dtype not in _INDICES or _is_transformed(weight):
        return NotImplemented
    if max_norm is not None:
        raise weight._in_place_error("F.embedding(max_norm=...)")
    return weight._gather(input)


def _get_item(tensor: Any, index: Any) -> Any:
    if not isinstance(tensor, OpaqueTensor) or _is_transformed(tensor):
        return NotImplemented
    result = tensor._get_item(index)
    # Indexing by tensors copies; by anything else it gives a view.
    copied = any(isinstance(leaf, torch.Tensor | list) for leaf in (index if isinstance(index, tuple) else (index,)))
    return result if copied else tensor._read_only(result)


def _turned(tensor: Any, *axes: int) -> Any:
    """Run `mT`, and `transpose` where it swaps the last two axes."""
    if not isinstance(tensor, OpaqueTensor) or _records_gradients(tensor) or tensor.ndim < 2:
        return NotImplemented
    if axes and {axis % tensor.ndim for axis in axes} != {tensor.ndim - 1, tensor.ndim - 2}:
        return NotImplemented
    return tensor._transposed()


def _transpose(input: Any, dim0: Any, dim1: Any) -> Any:
    return _turned(input, dim0, dim1) if isinstance(dim0, int) else NotImplemented  # axes may have names


def _turned_matrix(input: Any) -> Any:
    return _turned(input) if input.ndim == 2 else NotImplemented


def _set_item(tensor: Any, index: Any, value: Any) -> Any:
    if not isinstance(tensor, OpaqueTensor):
        return NotImplemented
    return tensor._set_item(index, value)


def _normal_tensors() -> AbstractContextManager[Any]:
    """Make no inference tensors here: torch refuses one as a view or alias of a tensor that is none."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class OpaqueTensor(torch.Tensor):
    """Abstract. A wrapper around the parts that a concrete class keeps.

    A concrete class makes its bare instance with `_shell`, sets its fields, and defines `_to_base_tensor`, `_parts` and
    `_rebuild`; it may define `_linear`, `_gather`, `_get_item` and further `RULES`, to compute without `materialise`.
    """

    RULES: ClassVar[Mapping[Any, Callable[..., Any]]] = {
        **MEMORY_RULES,
        F.linear: _linear,
        F.embedding: _embedding,
        torch.Tensor.__getitem__: _get_item,
        torch.Tensor.__setitem__: _set_item,
        torch.Tensor.t: _turned_matrix,
        torch.t: _turned_matrix,
        torch.Tensor.T.__get__: _turned_matrix,  # type: ignore[attr-defined]
        torch.Tensor.mT.__get__: _turned,  # type: ignore[attr-defined]
        torch.Tensor.transpose: _transpose,
        torch.transpose: _transpose,
    }
    _name: str
    _is_param: bool

    def __new__(cls, value: Any, requires_grad: bool | None = None) -> Self:
        """Make a parameter of `value`, an instance of the class.

        torch and accelerate rebuild a parameter as `type(parameter)(value, requires_grad=...)`; this is that call, and
        nothing else. They also put values of another kind in its place this way: with `requires_grad` given, those
        become a parameter of their own kind. Raises ConfigError for them otherwise: quantize a plain tensor, or rebuild
        the class from its state.
        """
        return cls._as_parameter(value, requires_grad)

    @classmethod
    def _as_parameter(cls, value: Any, requires_grad: bool | None) -> Self:
        if isinstance(value, cls):
            result: Any = value.detach().requires_grad_(bool(requires_grad))
            result._is_param = True
        elif requires_grad is None or not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{cls.__name__}(value) takes a {cls.__name__}, got {type(value).__name__}; "
                "make one with quantize(tensor) or from_offload_state(state)"
            )
        else:
            result = torch.nn.Parameter(value, requires_grad)
        kept: Self = result
        return kept

    @classmethod
    def _shell(cls, shape: Any, dtype: torch.dtype, device: Any, name: str = "") -> Self:
        """Make an instance without fields: contiguous strides, no storage, no gradient."""
        with _normal_tensors():
            result = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        result._name = name
        return result

    # ---- what a concrete class says -------------------------------------------------------------------------------

    def _to_base_tensor(self) -> torch.Tensor:
        """Compute the values: a plain tensor of this shape, dtype and device (or another opaque tensor: nesting)."""
        raise UnsupportedOpError(f"{type(self).__name__} does not give its values; define _to_base_tensor()")

    def _parts(self) -> dict[str, torch.Tensor]:
        """Give the tensors held, by name; each is also an attribute of that name. Shared, not copied."""
        raise UnsupportedOpError(f"{type(self).__name__} does not name its parts; define _parts()")

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        """Make the same tensor over other `parts` (other memory or device), acting as `dtype`."""
        raise UnsupportedOpError(f"{type(self).__name__} cannot be rebuilt; define _rebuild(parts, dtype)")

    def _with_dtype(self, dtype: torch.dtype) -> "OpaqueTensor":
        """Give the same weight acting as a tensor of `dtype`, sharing its parts."""
        return self._rebuild(self._parts(), dtype)

    def _to_device(self, device: torch.device) -> "OpaqueTensor":
        """Give the same weight with its parts on `device`."""
        return self._rebuild({name: part.to(device) for name, part in self._parts().items()}, self.dtype)

    def _alias(self) -> "OpaqueTensor":
        """Give a new tensor object over the same parts."""
        return self._rebuild(self._parts(), self.dtype)

    def _copy(self) -> "OpaqueTensor":
        """Give a new tensor over copies of the parts."""
        return self._rebuild({name: part.clone() for name, part in self._parts().items()}, self.dtype)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `x @ self.T + bias`. x: (..., K), self: (N, K). No gradient is recorded here."""
        return dense_product(x, materialise(self, "linear"), bias)

    def _linear_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Compute `grad @ self`. grad: (..., N)."""
        return grad @ materialise(self, "linear_backward")

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Give the rows at `indices`, any shape: a plain tensor of shape (*indices.shape, *self.shape[1:])."""
        return F.embedding(indices, materialise(self, "embedding"))

    def _get_item(self, index: Any) -> torch.Tensor:
        """Give `self[index]`. Default: of the plain values."""
        return materialise(self, "getitem")[index]

    def _transposed(self) -> Any:
        """Give self with its last two axes swapped in a form that needs no values, or NotImplemented (default)."""
        return NotImplemented

    def _read_only(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return value
        return ReadOnlyView.of(value, f"{self.name or 'an unnamed tensor'} ({type(self).__name__})")

    # ---- writes: persist or raise ---------------------------------------------------------------------------------

    def _in_place_error(self, op: object) -> InPlaceError:
        return InPlaceError(
            f"{op} would write to {self.name or 'an unnamed tensor'}, a {type(self).__name__} of shape "
            f"{tuple(self.shape)}, whose values are packed and cannot be changed in place; "
            "work on `w.to_base_tensor()` and put the result back as a new parameter, or materialize(model) first"
        )

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do `func`, an in-place aten overload that writes to self, so that it persists; or raise InPlaceError.

        Default: `copy_` from a tensor of the same class and shape takes over copies of its parts; all else raises.
        """
        if func is aten.copy_.default and type(args[1]) is type(self) and args[1].shape == self.shape:
            self._take_over(args[1]._rebuild(args[1]._copy()._parts(), self.dtype))
            return self
        raise self._in_place_error(func)

    def _set_item(self, index: Any, value: Any) -> None:
        """Do `self[index] = value` so that it persists; or raise InPlaceError (default)."""
        raise self._in_place_error("__setitem__")

    def _set_data(self, value: torch.Tensor) -> None:
        """Do `self.data = value`. Of the same class, `value` gives its parts; a plain one takes this tensor's place."""
        if type(value) is type(self) and (value.shape, value.dtype, value.device) == (
            self.shape,
            self.dtype,
            self.device,
        ):
            self._take_over(value)
        elif type(value) is type(self) or not isinstance(value, OpaqueTensor):
            with torch.no_grad():
                torch.utils.swap_tensors(self, torch.nn.Parameter(value, requires_grad=self.requires_grad))
        else:
            raise self._in_place_error(f".data = <{type(value).__name__}>")

    def _take_over(self, other: "OpaqueTensor") -> None:
        fields = {key: value for key, value in other.__dict__.items() if key not in ("_name", "_is_param")}
        self.__dict__.update(fields)

    # ---- what users call ------------------------------------------------------------------------------------------

    def to_base_tensor(self) -> torch.Tensor:
        """Compute the values, as a plain tensor of the same shape, dtype and device.

        While `torch.jit.trace` runs they come from the operator `t2n_hf::opaque_tensor_expand`: see `trace_op`.
        """
        return traced_values(self) if is_traced() else self._expanded()

    def _expanded(self) -> torch.Tensor:
        with torch.no_grad():
            return opaque_to_final_tensor(self._to_base_tensor())

    def to_trace_tensor(self, device: str) -> torch.Tensor:
        """Give what a tracer needs: shape and dtype only on "meta"; on another device, the values."""
        if torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self.to_base_tensor().to(device)

    @property
    def name(self) -> str:
        """The parameter's name, for messages; "" when nobody gave one. May be set."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    def opaque_nbytes(self) -> int:
        """Bytes that the parts take in memory (`nbytes` is what the dense tensor would take)."""
        return sum(p.opaque_nbytes if isinstance(p, OpaqueTensor) else p.nbytes for p in self._parts().values())

    @property
    def data(self) -> torch.Tensor:
        """The same tensor, detached; class and parts are kept. Assigning goes through `_set_data`."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._set_data(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpaqueTensor":
        """Copy the parts; name, parameter flag and requires_grad are kept."""
        if id(self) not in memo:
            memo[id(self)] = self._like_self(self._copy())
        return memo[id(self)]

    def __copy__(self) -> "OpaqueTensor":
        """Share the parts in a new tensor object."""
        return self._like_self(self._alias())

    def _like_self(self, result: "OpaqueTensor") -> "OpaqueTensor":
        result.requires_grad_(self.requires_grad)
        result._name = self._name
        if getattr(self, "_is_param", False):
            result._is_param = True
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: nothing in t2n_hf is pickled."""
        raise UnsupportedOpError(
            f"{self.name or 'an unnamed tensor'} is a {type(self).__name__}, which is not pickled: a pickle can run "
            "code when it is read. Save the model with save_pretrained(), or the tensor as its to_offload_state()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = f", name={self.name!r}" if self.name else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}{name}, "
            f"{self.opaque_nbytes} bytes)"
        )

    # ---- torch's protocols ----------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], FlattenContext]:
        """Name the attributes that hold tensors, and what else `__tensor_unflatten__` needs."""
        return list(self._parts()), FlattenContext(self)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: FlattenContext, size: Any, stride: Any
    ) -> Self:
        """Rebuild from the inner tensors; `size` and `stride` are those of the class and need not be said again."""
        return context.rebuild(inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of the class for `func`; without one, let torch take `func` apart into aten operators."""
        rule = cls.RULES.get(func)
        if rule is not None:
            result = rule(*args, **kwargs) if kwargs else rule(*args)
            if result is not NotImplemented:
                return result
        with _no_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do what keeps the class (detach, clone, to), send writes to their tensor, and materialise for all else."""
        kwargs = kwargs or {}
        rule = ATEN_RULES.get(func)
        if rule is not None and isinstance(args[0], OpaqueTensor):
            return rule(*args, **kwargs)
        written = next((w for w in written_arguments(func, args, kwargs) if isinstance(w, OpaqueTensor)), None)
        if written is not None:
            return written._write(func, args, kwargs)
        # Where no gradient is recorded, torch hands over operators that it takes apart elsewhere (`to`, `reshape`).
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        seen: list[OpaqueTensor] = []

        def plain(value: Any) -> Any:
            if not isinstance(value, OpaqueTensor):
                return value
            seen.append(value)
            return materialise(value, func)

        if not gives_view(func):
            return func(*tree_map(plain, args), **tree_map(plain, kwargs))
        with _normal_tensors():
            result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        return tree_map(lambda value: seen[0]._read_only(value), result)
