"""A tensor whose values a source loads when they are used: what it is, how it is read and copied."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import copy
from collections.abc import Sequence
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import Self

from t2n_hf.contract import OffloadState
from t2n_hf.errors import ResidencyError
from t2n_hf.residency import ServingPool, TensorResidencyPool, active_scope
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import RangeContent
from t2n_hf.tensor.eager import eagerly
from t2n_hf.tensor.product import RowwiseProduct, dense_product
from t2n_hf.tensor.rows import embedding_of_rows, item_of_rows
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.transposed import TransposedTensor
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["SourceTensor"]


class SourceTensor(OpaqueTensor):
    """The reading half of an OffloadedTensor, which adds where values come from, and writes."""

    _source: StoredSource
    _target: torch.device

    @classmethod
    def from_source(cls, source: StoredSource, device: Any = "cpu", name: str | None = None) -> Self:
        """Make a tensor whose values `source` loads, on `device`; `name` is that of the source unless it is given."""
        device = torch.device(device)
        result = cls._shell(source.shape, source.dtype, device, source.name if name is None else name)
        result._source, result._target = source, device
        return result

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
            f"{type(self).__name__}(shape={tuple(self._source.shape)}, dtype={self._source.dtype}, "
            f"device='{self._target}', name={self.name!r}, {kind}, {self.nbytes_loaded} bytes when loaded)"
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
        if pool is None or target.type == "meta":  # a shape is nothing to hold
            return self._source.load(target)
        try:
            return pool.resolve(self._source, target)
        except ResidencyError:
            if not pool.closed:
                raise
            return self._source.load(target)  # closed since it was looked at, by another thread

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
        found = self._passing_product(x, bias)
        if found is not None:
            return found
        value = self.reload()
        return F.linear(x, value, bias) if isinstance(value, OpaqueTensor) else dense_product(x, value, bias)

    def _passing_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Multiply with rows of the weight while they pass through memory; None when the weight does not pass."""
        pool, target = self._pool_now()
        if pool is None or x.shape[-1] != self._source.shape[-1]:
            return None
        product = RowwiseProduct(x, self._source.shape[0], bias)
        return product.result if pool.stream(self._source, target, product.add) else None

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
    @eagerly
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of this class for `func`, else that of the packed value, else let torch take it apart."""
        # Questions about a tensor are getters of attributes, and the most frequent calls here.
        if func not in cls.RULES and not isinstance(func, MethodWrapperType):
            leaves, spec = tree_flatten((args, kwargs or {}))
            if any(_packed_rule(leaf, func) for leaf in leaves):
                loaded = [leaf.reload() if _packed_rule(leaf, func) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(loaded, spec)
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    # ---- copies ---------------------------------------------------------------------------------------------------

    @property
    def __tensor_flatten__(self) -> Any:
        """Absent: there is nothing in memory to take apart, and torch.compile leaves what uses the tensor to Python."""
        raise AttributeError("__tensor_flatten__")

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
    if not isinstance(leaf, SourceTensor) or leaf.inner_class is None:
        return False
    # The rule first: looking at requires_grad comes through here again.
    return func in leaf.inner_class.RULES and not leaf.requires_grad
