"""The one road from an opaque tensor to a plain one, counted; and views of such values, which cannot be written to."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import threading
from collections import Counter
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from t2n_hf.errors import InPlaceError

__all__ = ["ReadOnlyView", "materialise", "materialised_counts", "written_by"]

_MATERIALISED: Final[Counter[tuple[str, str]]] = Counter()
_LOCK: Final = threading.Lock()
# Names that end like those of in-place methods and change no values.
_HARMLESS: Final = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad"})


def materialise(tensor: Any, op: object) -> torch.Tensor:
    """Turn the opaque `tensor` into a plain one because `op` has no rule for its class. See `materialised_counts`."""
    with _LOCK:
        _MATERIALISED[type(tensor).__name__, str(op)] += 1
    return tensor.to_base_tensor()


def materialised_counts() -> dict[tuple[str, str], int]:
    """Count how often `materialise` ran in this process, by (class name, operation)."""
    with _LOCK:
        return dict(_MATERIALISED)


class ReadOnlyView(torch.Tensor):
    """Plain values that an opaque tensor made for a view of itself (`w[0]`, `w.T`, `w.view(-1)`).

    In torch, writing to such a view writes to the tensor; here it would change values that nobody sees again, so it
    raises InPlaceError. Everything else gives plain tensors; views of the view are read-only as well.
    """

    _source: str

    @classmethod
    def of(cls, values: torch.Tensor, source: str) -> "ReadOnlyView":
        """Present `values` (shared) as a view of what `source` describes."""
        result = values.as_subclass(cls)
        result._source = source
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what would write to the view; keep the class for views of it."""
        kwargs = kwargs or {}
        written = next((leaf for leaf in written_by(func, args, kwargs) if isinstance(leaf, ReadOnlyView)), None)
        if written is not None:
            raise InPlaceError(
                f"{_name(func)} would write to a view of {written._source}, which was made from what that keeps packed "
                "or on disk: the write would be lost; work on a copy (`.clone()`), and put the result back with "
                "`w[index] = ...` where the class takes it, or as a new parameter"
            )
        if func is torch.Tensor.__format__:  # torch formats numbers of its own class alone
            return format(args[0].as_subclass(torch.Tensor), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        sources = {_storage_of(leaf): leaf._source for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}

        def keep(value: Any) -> Any:
            # What torch.func wraps has no memory of its own to tell a view by.
            if type(value) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(value):
                return value
            source = sources.get(_storage_of(value))
            return value if source is None else cls.of(value, source)

        # tree_map would turn a torch.Size into a tuple.
        return tree_map(keep, result) if type(result) in (torch.Tensor, tuple, list) else result


def _storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata


def _name(func: Any) -> str:
    # An overload of torch.ops is called "mul_.Scalar".
    return getattr(func, "__name__", str(func)).partition(".")[0]


def _writes_to_first(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") and name not in _HARMLESS


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Give what `func`, a function or method of torch seen before dispatch, would write to, by its name and `out=`."""
    name = _name(func)
    if name == "__set__":
        # Of the attributes of a tensor, `data` holds values.
        targets = args[:1] if getattr(func.__self__, "__name__", "") == "data" else ()
    elif _writes_to_first(name):
        targets = args[:1]
    else:
        targets = (kwargs.get("out"),)
    return tree_leaves(targets)


_NOT_IN_PLACE: Final = frozenset({"__int__", "__index__", "__invert__", "__iter__", "__init__"})
