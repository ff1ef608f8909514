"""OffloadedTensor: a tensor whose values stay on disk and are in memory only while they are used."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import Self

from t2n_hf.contract import OffloadState
from t2n_hf.errors import ConfigError, InPlaceError
from t2n_hf.registry import class_of_tag
from t2n_hf.residency import ServingPool, TensorResidencyPool, active_scope
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import MemoryContent, RangeContent
from t2n_hf.tensor.persist import run_on_copies
from t2n_hf.tensor.rows import embedding_of_rows, item_of_rows
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.transposed import TransposedTensor
from t2n_hf.tensor.wrapper import OpaqueTensor, opaque_to_final_tensor

__all__ = ["OffloadedTensor"]

aten = torch.ops.aten


@final
class OffloadedTensor(OpaqueTensor):
    """Tensor subclass that maintains data on disk.

    It has the shape, dtype and target device of its values, and holds none of them. Each use loads what it needs,
    through the pool of the innermost scope, else the pool that the tensor is bound to (`bind_pool`), else directly. A
    packed value (quantized) stays packed, and computes by its own rules.

    Writes persist, in a private spill: never in the file that the values came from. What cannot persist raises
    InPlaceError, naming the tensor. Aliases (`detach`, `nn.Parameter(w)`) share one `source`; `clone`, `deepcopy` and
    `to` give a tensor of its own, over the same bytes until one of them is written.
    """

    _source: StoredSource
    _target: torch.device

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

    @classmethod
    def from_source(cls, source: StoredSource, device: Any = "cpu", name: str | None = None) -> Self:
        """Make a tensor whose values `source` loads, on `device`; `name` is that of the source unless it is given."""
        device = torch.device(device)
        result = cls._shell(source.shape, source.dtype, device, source.name if name is None else name)
        result._source, result._target = source, device
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

    # ---- what it is -----------------------------------------------------------------------------------------------

    @property
    def source(self) -> StoredSource:
        """What pools load, shared by all aliases of this tensor."""
        return self._source

    @property
    def target_device(self) -> torch.device:
        """Where values are loaded to."""
        return self._target

    @property
    def pool(self) -> TensorResidencyPool | None:
        """The pool that the tensor is bound to."""
        return self._source.pool

    def bind_pool(self, pool: TensorResidencyPool | None) -> None:
        """Let every read of this tensor and its aliases, from any thread, go through `pool` (None: unbind)."""
        self._source.pool = pool

    @property
    def inner_class(self) -> type[OpaqueTensor] | None:
        """The class of a packed value, None for a plain one."""
        return self._source.content.kind

    @property
    def nbytes_loaded(self) -> int:
        """Bytes in memory once loaded."""
        return self._source.nbytes

    @property
    def source_range(self) -> ByteRange | None:
        """The range of the user's file that the values are in; None when they are elsewhere, or were written since."""
        self._flush()
        content = self._source.content
        return content.ranges[0] if isinstance(content, RangeContent) and len(content.ranges) == 1 else None

    def stored_state(self) -> OffloadState | None:
        """Read the offload state of a packed value; None for a plain one."""
        self._flush()
        if self.inner_class is None:
            return None
        state: OffloadState = self._source.load(torch.device("cpu")).to_offload_state()  # type: ignore[attr-defined]
        return state

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the tensor is on the meta device: always False, as the tensor is (off|re)loaded from disk."""
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "plain" if self.inner_class is None else self.inner_class.__name__
        return (
            f"OffloadedTensor(shape={tuple(self._source.shape)}, dtype={self._source.dtype}, device='{self._target}', "
            f"name={self.name!r}, {kind}, {self.nbytes_loaded} bytes when loaded)"
        )

    # ---- reading --------------------------------------------------------------------------------------------------

    def _pool_now(self) -> tuple[ServingPool | None, torch.device]:
        scope = active_scope()
        if scope is not None and not scope.pool.closed:
            return scope.pool, scope.device or self._target
        pool = self._source.pool
        return (None if pool is None or pool.closed else pool), self._target

    def reload(self, device: Any = None) -> torch.Tensor:
        """Load the stored value on `device` (None: its own), or take it from the pool: plain, or still packed.

        The optional override does not change the tensor's configured target device. The result may be the pool's own
        value: do not write to it; see `TensorResidencyPool.acquire` for that.
        """
        pool, target = self._pool_now()
        if device is not None:
            target = torch.device(device)
        return self._source.load(target) if pool is None else pool.resolve(self._source, target)

    def _flush(self) -> None:
        """Let what a pool holds modified be stored."""
        for pool in {self._pool_now()[0], self._source.pool} - {None}:
            if not pool.closed:  # type: ignore[union-attr]
                pool.flush(self._source)  # type: ignore[union-attr]

    def _rows(self, rows: Sequence[int]) -> torch.Tensor | None:
        """Read rows at ascending indices alone; None when the whole value is at hand or has to be read."""
        pool, target = self._pool_now()
        at_hand = pool is not None and pool.is_resident(self._source)
        return None if at_hand else self._source.gather(rows, target)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.reload(), bias)

    def _linear_backward(self, grad: torch.Tensor) -> torch.Tensor:
        value = self.reload()
        return value._linear_backward(grad) if isinstance(value, OpaqueTensor) else grad @ value

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        found = embedding_of_rows(indices, self._source.shape[0], self._rows)
        return F.embedding(indices, self.reload()) if found is None else found

    def _get_item(self, index: Any) -> torch.Tensor:
        found = item_of_rows(index, self._source.shape[0], self._rows) if self._source.shape else None
        return self.reload()[index] if found is None else found

    def _transposed(self) -> Any:
        return TransposedTensor.over(self, self.name)

    def _to_base_tensor(self) -> torch.Tensor:
        return self.reload()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of this class for `func`, else that of the packed value, else let torch take it apart."""
        if func not in cls.RULES:
            leaves, spec = tree_flatten((args, kwargs or {}))
            if any(_packed_rule(leaf, func) for leaf in leaves):
                loaded = [leaf.reload() if _packed_rule(leaf, func) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(loaded, spec)
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

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

        The shape may change. Raises InPlaceError for the forms of `set_` that name a storage, and for another dtype.
        """
        if args or kwargs or not isinstance(source, torch.Tensor):
            raise self._in_place_error("set_ with a storage")
        self.update_values(source, strict_shape=False)
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
            if value.device != self._target:
                self._become(self._source, value.device)
            self.update_values(value, strict_shape=False, strict_dtype=False)
        elif value._source is not self._source or value._target != self._target:
            self._become(value._source.fork(pool=self.pool), value._target)

    # ---- copies ---------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, torch.Tensor]:
        return {}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return self._alias() if dtype == self._source.dtype else self._with_dtype(dtype)

    def _alias(self) -> Self:
        return self.from_source(self._source, self._target, self.name)

    def _copy(self) -> Self:
        return self._forked(self._source.dtype, self._target)

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return self._forked(dtype, self._target)

    def _to_device(self, device: torch.device) -> Self:
        return self._forked(self._source.dtype, device)

    def _forked(self, dtype: torch.dtype, device: torch.device) -> Self:
        self._flush()
        return self.from_source(self._source.fork(dtype, self.pool), device, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueTensor:
        """Make a tensor of its own over the same bytes, bound to the copy of its pool; ties are kept."""
        if id(self) not in memo:
            source = memo.get(id(self._source))
            if source is None:
                self._flush()
                source = memo[id(self._source)] = self._source.fork(pool=copy.deepcopy(self.pool, memo))
            memo[id(self)] = self._like_self(self.from_source(source, self._target))
        return memo[id(self)]


def _packed_rule(leaf: Any, func: Any) -> bool:
    if not isinstance(leaf, OffloadedTensor) or leaf.inner_class is None:
        return False
    # The rule first: looking at requires_grad comes through here again.
    return func in leaf.inner_class.RULES and not leaf.requires_grad
