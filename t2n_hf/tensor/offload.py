"""OffloadedTensor: a tensor whose values stay on disk and are in memory only while they are used."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from typing_extensions import Self

from t2n_hf.contract import OffloadState
from t2n_hf.errors import ConfigError, InPlaceError
from t2n_hf.registry import class_of_tag
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import MemoryContent, RangeContent
from t2n_hf.tensor.persist import run_on_copies
from t2n_hf.tensor.source_tensor import SourceTensor
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.wrapper import OpaqueTensor, opaque_to_final_tensor

__all__ = ["OffloadedTensor"]

aten = torch.ops.aten


@final
class OffloadedTensor(SourceTensor):
    """Tensor subclass that maintains data on disk.

    It has the shape, dtype and target device of its values, and holds none of them. Each use loads what it needs,
    through the pool of the innermost scope, else the pool that the tensor is bound to (`bind_pool`), else directly. A
    packed value (quantized) stays packed, and computes by its own rules.

    Writes persist, in a private spill: never in the file that the values came from. What cannot persist raises
    InPlaceError, naming the tensor. Aliases (`detach`, `nn.Parameter(w)`) share one `source`; `clone`, `deepcopy` and
    `to` give a tensor of its own, over the same bytes until one of them is written.
    """

    def __new__(  # noqa: PLR0917 - the signature that code written for torch_to_nnef calls
        cls,
        elem: torch.Tensor,
        device: Any = None,
        offload_dir: str | Path | None = None,
        name: str = "",
        offloaded_tensor_type: type[torch.Tensor] = torch.Tensor,
        force_gc_collect: bool = False,
        storage_id: str | None = None,
        *,
        requires_grad: bool = False,
    ) -> Self:
        """Offload the values of `elem` to a private file in `offload_dir`, to be loaded on `device` (None: its own).

        Without `device`, give a parameter (over the same source if `elem` is offloaded): torch and accelerate rebuild
        parameters with this call. `storage_id` stands for `name` in messages of the pool; `force_gc_collect` is not
        needed. Raises ConfigError when `elem` has no values (meta), or is no `offloaded_tensor_type`.
        """
        if not isinstance(elem, offloaded_tensor_type):
            raise ConfigError(f"{name}: expected a {offloaded_tensor_type.__name__}, got a {type(elem).__name__}")
        result: Any
        if isinstance(elem, cls):
            result = elem if device is None else elem.to(device)
        elif elem.is_meta:
            raise ConfigError(
                f"{name or 'the tensor'} is on the meta device and has no values to offload; "
                "use from_byte_range, from_state or from_original_tensor"
            )
        else:
            source = StoredSource.spilling(elem, storage_id or name, offload_dir)
            result = cls.from_source(source, elem.device if device is None else device, name)
        if device is None or requires_grad:
            return cls._as_parameter(result, requires_grad)
        return result

    # ---- where values come from -----------------------------------------------------------------------------------

    @classmethod
    def from_original_tensor(
        cls, tensor: torch.Tensor, name: str, offload_dir: str | Path | None = None, suffix_log_msg: str = ""
    ) -> Self:
        """Take a torch.Tensor or OpaqueTensor and offload it to disk, in a private file in `offload_dir`.

        The result is loaded on the device of `tensor`. `suffix_log_msg` is accepted and not needed. Raises
        UnsupportedOpError for an opaque class without an offload state, StorageError when the disk is full.
        """
        if isinstance(tensor, cls):
            return cls.from_source(tensor._source.fork(), tensor._target, name)
        return cls.from_source(StoredSource.spilling(tensor, name, offload_dir), tensor.device)

    @classmethod
    def from_byte_range(
        cls,
        byte_range: ByteRange | Sequence[ByteRange],
        name: str,
        dtype: torch.dtype | None = None,
        device: Any = "cpu",
        *,
        shape: Sequence[int] | None = None,
        spill_dir: str | Path | None = None,
    ) -> Self:
        """Leave the values in the user's safetensors file; they are read from there, and cast to `dtype` when loaded.

        Several ranges are one tensor of `shape`, their bytes one after the other (fused experts over the experts' own
        weights). Writes go to a private file in `spill_dir`. Raises FormatError when bytes and shape do not agree.
        """
        ranges = [byte_range] if isinstance(byte_range, ByteRange) else list(byte_range)
        if not ranges:
            raise ConfigError(f"{name}: got no byte ranges; give one, or several and the shape of all")
        if shape is None and len(ranges) != 1:
            raise ConfigError(f"{name}: the shape of {len(ranges)} byte ranges has to be given")
        content = RangeContent(ranges, ranges[0].shape if shape is None else shape)
        source = StoredSource(content, content.shape, dtype or content.dtype, name, spill_folder=spill_dir)
        return cls.from_source(source, device)

    @classmethod
    def from_state(
        cls,
        state: OffloadState,
        name: str,
        dtype: torch.dtype | None = None,
        device: Any = "cpu",
        *,
        compute: str | None = None,
        spill_dir: str | Path | None = None,
    ) -> Self:
        """Offload the packed parts of `state`, acting as `dtype` (None: what the state says), computing as `compute`.

        Raises UnknownTagError when no installed class declares the state's tag, FormatError when it is damaged.
        """
        value = class_of_tag(state["tag"]).from_offload_state(state, None)
        value = value if dtype is None else value.to(dtype)
        if compute is not None and hasattr(value, "with_compute"):
            value = value.with_compute(compute)
        return cls.from_source(StoredSource.spilling(value, name, spill_dir), device)

    @classmethod
    def over(cls, tensor: torch.Tensor, dtype: torch.dtype, name: str) -> Self:
        """Show `tensor`, which stays in memory, as a tensor of `dtype`; it is cast anew for each use."""
        if isinstance(tensor, cls):
            return cls.from_source(tensor._source.fork(dtype), tensor._target, name)
        return cls.from_source(StoredSource(MemoryContent(tensor), tensor.shape, dtype, name), tensor.device)

    # ---- writing --------------------------------------------------------------------------------------------------

    def update_values(self, values: torch.Tensor, strict_shape: bool = True, strict_dtype: bool = True) -> None:
        """Replace offloaded tensor by new 'values' tensor (plain, or of a class with an offload state).

        With `strict_shape` (`strict_dtype`) another shape (dtype) raises InPlaceError, else the tensor takes it.
        """
        for strict, what in ((strict_shape, "shape"), (strict_dtype, "dtype")):
            new, old = getattr(values, what), getattr(self._source, what)
            if strict and new != old:
                raise InPlaceError(f"{self.name}: new values have {what} {new}, the tensor has {old}")
        if isinstance(values, OffloadedTensor):
            values = values.reload()
        if (values.shape, values.dtype) == (self._source.shape, self._source.dtype):
            self._source.store(values)
            return
        old = self._source
        self._become(StoredSource.spilling(values, old.name, old.spill_folder, old.pool), self._target)

    def _become(self, source: StoredSource, device: torch.device) -> None:
        # Shape, dtype and device of a wrapper are fixed: another one takes this object's place.
        with torch.no_grad():
            other = self.from_source(source, device, self.name).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                other._is_param = True
            torch.utils.swap_tensors(self, other)

    def set_(self, source: torch.Tensor, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Implement tensor-style storage replacement for offloaded payloads: the values of `source` are stored.

        Shape, dtype and class may change. Raises InPlaceError for the forms of `set_` that name a storage.
        """
        if args or kwargs or not isinstance(source, torch.Tensor):
            raise self._in_place_error("set_ with a storage")
        self.update_values(source, strict_shape=False, strict_dtype=False)
        return self

    def _in_place_error(self, op: object) -> InPlaceError:
        if self.inner_class is None:
            return InPlaceError(
                f"{op} cannot be made to persist on {self.name or 'an unnamed tensor'}, which is offloaded"
            )
        return super()._in_place_error(f"{op} (offloaded {self.inner_class.__name__})")

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.copy_.default and args[0] is self and self._copied_packed(args[1]):
            return self
        result, written = run_on_copies(func, args, kwargs, OffloadedTensor, lambda tensor: tensor._own_values(func))
        for tensor, values in written:
            if (values.shape, values.dtype) != (tensor._source.shape, tensor._source.dtype):
                raise tensor._in_place_error(func)
        for tensor, values in written:
            tensor._source.store(values)
        return result

    def _own_values(self, op: object) -> torch.Tensor:
        """Give a copy of the plain values, to be written to and stored."""
        value = self.reload()
        if isinstance(value, OpaqueTensor):
            raise self._in_place_error(op)
        return value.clone()

    def _copied_packed(self, value: torch.Tensor) -> bool:
        if isinstance(value, OffloadedTensor):
            value = value.reload()
        if self.inner_class is None or type(value) is not self.inner_class or value.shape != self._source.shape:
            return False
        self._source.store(value.to(self._source.dtype))
        return True

    def _set_item(self, index: Any, value: Any) -> None:
        values = self._own_values("__setitem__")
        values[index] = opaque_to_final_tensor(value) if isinstance(value, OpaqueTensor) else value
        self._source.store(values)

    def _set_data(self, value: torch.Tensor) -> None:
        if not isinstance(value, OffloadedTensor):
            self.update_values(value, strict_shape=False, strict_dtype=False)
            if value.device != self._target:
                self._become(self._source, value.device)
        elif value._source is not self._source or value._target != self._target:
            self._become(value._source.fork(pool=self.pool), value._target)
