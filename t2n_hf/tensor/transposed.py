"""TransposedTensor: an opaque tensor seen with its last two axes swapped.

Some layers (GPT-2's Conv1D) keep a weight as (in, out) and compute `x @ W`, while block formats group values along the
input axis. Such a weight is stored turned, (out, in), and this class presents it the way that the layer expects.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from typing_extensions import Self

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.errors import FormatError, UnknownTagError, UnsupportedOpError
from t2n_hf.registry import class_of_tag
from t2n_hf.tensor.rows import whole_number
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["TransposedTensor"]


def _matmul(input: Any, other: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - handed through from torch
    """`x @ W`, as a product with the inner tensor. Its gradient for x is that of F.linear."""
    if kwargs or not isinstance(other, TransposedTensor) or isinstance(input, OpaqueTensor):
        return NotImplemented
    if other.ndim != 2 or other.requires_grad or input.ndim == 0:
        return NotImplemented
    return F.linear(input, other.inner)


def _mm(input: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - handed through from torch
    return _matmul(input, mat2, **kwargs)


def _bmm(input: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - handed through from torch
    """One product for each matrix of a stack: of experts, one at a time is dense."""
    if kwargs or not isinstance(mat2, TransposedTensor) or isinstance(input, OpaqueTensor):
        return NotImplemented
    if mat2.requires_grad or mat2.ndim != 3 or input.ndim != 3 or len(input) != len(mat2.inner):
        return NotImplemented
    matrices = [mat2.inner[item] for item in range(len(input))]
    if not all(isinstance(matrix, OpaqueTensor) for matrix in matrices):
        return NotImplemented
    return torch.stack([F.linear(rows, matrix) for rows, matrix in zip(input, matrices, strict=True)])


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, out: Any = None) -> Any:  # noqa: ANN401
    """`beta * input + alpha * (x @ W)`."""
    product = NotImplemented if out is not None else _matmul(mat1, mat2)
    if product is NotImplemented or isinstance(input, OpaqueTensor):
        return NotImplemented
    return input * beta + product * alpha if (beta, alpha) != (1, 1) else input + product


@final
class TransposedTensor(OpaqueTensor, SupportsOffloadState):
    """Shape (..., K, N) over an inner opaque tensor (..., N, K) of any class, which keeps its own rules and state.

    State: the inner tensor's own parts, and in `meta` the inner tag and meta.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.transposed.v1"
    RULES: ClassVar = {
        **OpaqueTensor.RULES,
        torch.Tensor.matmul: _matmul,
        torch.Tensor.__matmul__: _matmul,
        torch.Tensor.mm: _mm,
        torch.matmul: _matmul,
        torch.mm: _mm,
        torch.Tensor.bmm: _bmm,
        torch.bmm: _bmm,
        torch.Tensor.addmm: _addmm,
        torch.addmm: _addmm,
    }
    inner: OpaqueTensor  # type: ignore[assignment]  # torch has a method of this name, an inner product

    @classmethod
    def over(cls, inner: OpaqueTensor, name: str = "") -> Self:
        """Present `inner` (shared) with its last two axes swapped; named `name`, by default like `inner`."""
        shape = inner.shape
        result = cls._shell((*shape[:-2], shape[-1], shape[-2]), inner.dtype, inner.device, name or inner.name)
        result.inner = inner
        return result

    def _to_base_tensor(self) -> torch.Tensor:
        return self.inner.to_base_tensor().transpose(-1, -2).contiguous()

    def _parts(self) -> dict[str, torch.Tensor]:
        return {"inner": self.inner}

    def _rebuild(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> Self:
        inner: Any = parts["inner"]
        return self.over(inner if inner.dtype == dtype else inner._with_dtype(dtype), self.name)

    def _transposed(self) -> OpaqueTensor:
        return self.inner

    def _get_item(self, index: Any) -> torch.Tensor:  # noqa: ANN401 - whatever indexing takes
        if self.ndim > 2 and isinstance(whole_number(index), int):
            item = self.inner[index]
            if isinstance(item, OpaqueTensor):
                return self.over(item)
        return super()._get_item(index)

    def with_compute(self, compute: str) -> Self:
        """Give the same weight with its inner tensor set to compute "exact", "fast" or "compiled"."""
        inner: Any = self.inner
        return self.over(inner.with_compute(compute), self.name) if hasattr(inner, "with_compute") else self

    def to_offload_state(self) -> OffloadState:
        """Give the inner tensor's parts; its tag and meta are kept in this state's meta."""
        return self._state_around("to_offload_state")

    def to_private_state(self) -> OffloadState:
        """Give the inner tensor's private state, see `SupportsOffloadState`."""
        return self._state_around("to_private_state")

    def _state_around(self, method: str) -> OffloadState:
        held: Any = self.inner
        while isinstance(held, OpaqueTensor) and not isinstance(held, SupportsOffloadState):
            held = held._to_base_tensor()  # an offloaded tensor gives what it holds packed
        if not isinstance(held, SupportsOffloadState):
            raise UnsupportedOpError(
                f"{self.name or 'an unnamed tensor'} turns plain values, which have no offload state; "
                "use its to_base_tensor()"
            )
        inner: OffloadState = getattr(held, method)()
        meta = {"inner_tag": inner["tag"], "inner_meta": inner["meta"]}
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors=inner["tensors"], meta=meta)

    @classmethod
    def row_parts(cls, meta: Mapping[str, Any], shape: Sequence[int]) -> frozenset[str]:
        """Of a weight of 3 or more axes, what the inner class says: the first axis is not one of the two swapped."""
        if len(shape) < 3:
            return frozenset()
        inner_shape = (*shape[:-2], shape[-1], shape[-2])
        return class_of_tag(meta["inner_tag"]).row_parts(meta.get("inner_meta", {}), inner_shape)

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> Self:  # noqa: ANN401
        """Rebuild the inner tensor by its own class. Raises FormatError without one, UnknownTagError for its tag."""
        meta = state["meta"]
        if not isinstance(meta.get("inner_tag"), str):
            raise FormatError(f"a transposed state needs 'inner_tag' in its meta, got {sorted(meta)}")
        inner_state = OffloadState(tag=meta["inner_tag"], tensors=state["tensors"], meta=meta.get("inner_meta", {}))
        try:
            inner_class = class_of_tag(inner_state["tag"])
        except UnknownTagError as error:
            raise UnknownTagError(f"inside a transposed weight: {error}") from error
        inner: Any = inner_class.from_offload_state(inner_state, target_device)
        return cls.over(inner)
