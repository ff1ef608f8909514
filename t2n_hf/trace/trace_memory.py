"""What the tensors of a dispatch trace hold while it runs: values while all they come from has some, else shapes."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, final

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError

__all__ = ["TraceMemory", "is_opaque"]

_NO_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_LENGTHS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether torch hands every operator on this tensor to the code of its class, which may read what it keeps."""
    return type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH and not isinstance(tensor, FakeTensor)


@final
class TraceMemory:
    """Runs operators for a trace, on values or on shapes, so that nothing that the trace was given changes.

    An operator runs on values when all its tensors have some. As soon as one has only a shape (a fake tensor, or the
    stand-in of an opaque one), so has the result; a tensor that is written from it has lost its values, and all its
    views have. Memory that was lent by the caller is copied before the first write to it.
    """

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._without_values: set[StorageWeakRef] = set()
        self._from_inputs: set[StorageWeakRef] = set()
        self._lent: dict[StorageWeakRef, list[weakref.ref[Any]]] = {}

    # Tensors without values

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Use the mode of the fake tensors among `tensors`. Raises CaptureError when they have several."""
        modes = {id(tensor.fake_mode): tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)}
        if self._mode is not None:
            modes[id(self._mode)] = self._mode
        if len(modes) > 1:
            raise CaptureError(f"fake tensors of {len(modes)} modes meet in one trace; make all of them in one mode")
        self._mode = next(iter(modes.values()), None)

    @property
    def mode(self) -> FakeTensorMode:
        """The mode of all fake tensors of the trace; made when it is first needed."""
        if self._mode is None:
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        return self._mode

    def described(self, value: Any) -> Any:
        """Fake tensors like those in `value`, a pytree, which stay as they are when the tensors are changed."""
        return pytree.tree_map_only(torch.Tensor, self._shaped, value)

    def _shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            self.adopt([tensor])
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        with self.mode:
            empty = any(isinstance(length, int) and length == 0 for length in shape)
            if not isinstance(offset, int) or offset == 0 or empty:
                return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            end = offset + 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            return torch.empty(end, dtype=tensor.dtype, device=tensor.device).as_strided(shape, stride, offset)

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself while it has values, or is fake; what stands for it otherwise."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if is_opaque(tensor):
            if id(tensor) not in self._stand_ins:
                self._stand_ins[id(tensor)] = tensor, self._shaped(tensor)
            return self._stand_ins[id(tensor)][1]
        return self._without(tensor) if self._storage(tensor) in self._without_values else tensor

    def _without(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor, static_shapes=True)

    @staticmethod
    def _storage(tensor: torch.Tensor) -> StorageWeakRef:
        return StorageWeakRef(tensor.untyped_storage())

    # Whose memory it is

    def lend(self, holder: Any) -> None:
        """Take note of an object whose `elem` lies in memory of the caller."""
        if not isinstance(holder.elem, FakeTensor) and not is_opaque(holder.elem):
            self._lent.setdefault(self._storage(holder.elem), []).append(weakref.ref(holder))

    def lend_views(self, holder: Any) -> None:
        """Do the same if `elem` is a view of such memory."""
        if self._lent and not isinstance(holder.elem, FakeTensor) and self._storage(holder.elem) in self._lent:
            self.lend(holder)

    def _own(self, tensor: torch.Tensor) -> None:
        """Copy the memory of a tensor, if it is lent, for everything that looks at it."""
        storage = tensor.untyped_storage()
        holders = self._lent.pop(StorageWeakRef(storage), None)
        if holders is None:
            return
        copied = storage.clone()
        if StorageWeakRef(storage) in self._from_inputs:
            self._from_inputs.add(StorageWeakRef(copied))
        for holder in (reference() for reference in holders):
            if holder is None:
                continue
            elem = holder.elem
            elem.set_(copied, elem.storage_offset(), elem.size(), elem.stride())

    # What depends on the inputs

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Take note that the values of `tensor` are those of an input."""
        self._from_inputs.add(self._storage(self.current(tensor)))

    def depends_on_inputs(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the values of any of these come from an input."""
        return any(self._storage(self.current(tensor)) in self._from_inputs for tensor in tensors)

    # Operators

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Run an operator that writes to `written`, some of the tensors in its arguments.

        Raises:
            CaptureError: it needs values that are not there.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.adopt(given)
        leaves = [self.current(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        lengths = any(isinstance(leaf, _LENGTHS) for leaf in leaves)  # they have no values either
        if lengths or any(isinstance(tensor, FakeTensor) for tensor in tensors):
            self._without_values.update(self._storage(tensor) for tensor in written if not is_opaque(tensor))
            leaves = [self._without(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        else:
            for tensor in written:
                self._own(tensor)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        symbolic = self._mode is not None and self._mode.shape_env is not None
        try:
            # Torch's own rules in Python are those that take symbols for lengths.
            with self.mode if lengths else nullcontext(), enable_python_dispatcher() if symbolic else nullcontext():
                result = func(*args, **kwargs)
        except _NO_VALUES as error:
            raise _needs_values(func, type(error).__name__) from error
        if symbolic and free_unbacked_symbols(pytree.tree_leaves(result)):
            raise _needs_values(func, f"it gives {result}")
        if self._from_inputs and self.depends_on_inputs(given):
            self._from_inputs.update(self._storage(t) for t in _tensors(result) if t.layout is torch.strided)
            self._from_inputs.update(self._storage(self.current(tensor)) for tensor in written)
        return result


def _needs_values(func: Any, why: str) -> CaptureError:
    return CaptureError(
        f"{func} needs the values of a tensor that has only a shape here: it comes from a fake tensor, or from an "
        f"opaque weight ({why}); trace with real tensors, or compute it before"
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
