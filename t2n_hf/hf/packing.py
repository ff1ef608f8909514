"""Quantizing one weight: as a whole, or by its first axis: one expert, or some rows of a large matrix, at a time."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from t2n_hf.contract import OffloadState, WeightFormat
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.sampled_error import SampledError
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["ItemPacker", "keeps_rows_apart", "packs_by_item", "quantized", "rows_at_once"]

# A matrix larger than this is quantized some rows at a time, so that few pages of its checkpoint are in memory.
_LARGE_NBYTES: Final = 32 << 20
_ROWS_NBYTES: Final = 8 << 20


def quantized(
    value: torch.Tensor,
    choice: Choice,
    *,
    dtype: torch.dtype,
    name: str,
    compute: str,
    importance: torch.Tensor | None = None,
    error: SampledError | None = None,
) -> torch.Tensor:
    """Quantize `value`, a plain float tensor, as `choice` says; the result acts as a tensor of `dtype`.

    A stack of matrices that has to be turned is turned one at a time. `importance` is f32 (K,), or (E, K) for a stack
    of E. `error` takes how far the result is from `value`.
    Raises QuantizationError naming `name`.
    """
    own = importance is not None and importance.dim() > 1
    if (choice.transposed or own) and value.dim() > 2 and packs_by_item(choice, value.shape):
        items = ItemPacker(value.shape[0], choice, dtype=dtype, name=name, importance=importance, error=error)
        for item in range(value.shape[0]):
            items.add(value[item : item + 1])
        return items.finish(compute)
    if importance is not None and own:  # its class does not keep matrices apart
        importance = importance.mean(dim=0)
    packed = _packed(value, choice, dtype=dtype, name=name, importance=importance)
    if error is not None:
        error.add(value, _presented(packed, choice))
    return _presented(_computing(packed, compute), choice)


def _packed(
    value: torch.Tensor, choice: Choice, *, dtype: torch.dtype, name: str, importance: torch.Tensor | None
) -> OpaqueTensor:
    assert choice.format is not None
    held = value.transpose(-1, -2).contiguous() if choice.transposed else value
    # Classes that were written before there was such a thing do not take it.
    weighted = {} if importance is None else {"importance": importance}
    packed = choice.format.quantize(held, dtype=dtype, name=name, **weighted)
    assert isinstance(packed, OpaqueTensor)
    return packed


def _computing(packed: OpaqueTensor, compute: str) -> OpaqueTensor:
    assert isinstance(packed, WeightFormat)
    result = packed.with_compute(compute)
    assert isinstance(result, OpaqueTensor)
    return result


def _presented(packed: OpaqueTensor, choice: Choice) -> OpaqueTensor:
    return TransposedTensor.over(packed) if choice.transposed else packed


def packs_by_item(choice: Choice, shape: torch.Size | tuple[int, ...]) -> bool:
    """Say whether a stack of matrices of `shape` can be quantized one at a time: its class keeps them apart."""
    if choice.format is None or len(shape) < 3 or 0 in shape:
        return False
    return _keeps_items_apart(choice.format, len(shape), shape[-2] if choice.transposed else shape[-1])


def rows_at_once(choice: Choice, value: torch.Tensor) -> int | None:
    """Say how many rows of the matrix `value` are to be quantized at a time; None for all of them."""
    if value.dim() != 2 or value.nbytes < _LARGE_NBYTES or not keeps_rows_apart(choice, value.shape):
        return None
    return max(1, _ROWS_NBYTES // (value.shape[1] * value.element_size()))


def keeps_rows_apart(choice: Choice, shape: Sequence[int]) -> bool:
    """Say whether a matrix of `shape` can be quantized some rows at a time: its class keeps them apart."""
    return choice.format is not None and not choice.transposed and _keeps_items_apart(choice.format, 2, shape[1])


def _keeps_items_apart(kind: type[WeightFormat], rank: int, columns: int) -> bool:
    """Say whether all that a class keeps of a tensor (..., columns) is there item for item of the first axis."""
    smallest: Any = kind.quantize(torch.zeros(*[1] * (rank - 1), columns))
    state: OffloadState = smallest.to_offload_state()
    return kind.row_parts(state["meta"], tuple(smallest.shape)) >= state["tensors"].keys()


class ItemPacker:
    """Quantizes a weight of `count` items (matrices of a stack, rows of a matrix), some as they are added.

    Of floats, there is only what is being added. For weights of which `packs_by_item` is true, or that have
    `rows_at_once`.
    """

    def __init__(
        self,
        count: int,
        choice: Choice,
        *,
        dtype: torch.dtype,
        name: str,
        importance: torch.Tensor | None = None,
        error: SampledError | None = None,
    ) -> None:
        self._count = count
        self._choice = choice
        self._options: dict[str, Any] = {"dtype": dtype, "name": name}
        self._importance = importance
        self._error = error
        self._parts: dict[str, torch.Tensor] = {}
        self._meta: dict[str, Any] = {}
        self._done = 0

    def add(self, value: torch.Tensor) -> None:
        """Quantize the next items, (n, ...) as the parameter holds them. Raises QuantizationError naming the weight."""
        importance = self._importance
        if importance is not None and importance.dim() > 1:
            importance = importance[self._done]
        packed = _packed(value, self._choice, **self._options, importance=importance)
        if self._error is not None:
            self._error.add(value, _presented(packed, self._choice))
        state: OffloadState = packed.to_offload_state()  # type: ignore[attr-defined]
        if not self._parts:
            self._meta = state["meta"]
            self._parts = {key: part.new_empty(self._count, *part.shape[1:]) for key, part in state["tensors"].items()}
        for key, part in state["tensors"].items():
            self._parts[key][self._done : self._done + value.shape[0]] = part
        self._done += value.shape[0]

    def finish(self, compute: str) -> torch.Tensor:
        """Give the whole weight."""
        assert self._done == self._count
        assert self._choice.format is not None
        kind = self._choice.format
        whole: Any = kind.from_offload_state(
            OffloadState(tag=kind.OFFLOAD_STATE_TAG, tensors=self._parts, meta=self._meta)
        )
        whole.name = self._options["name"]
        return _presented(_computing(whole, compute), self._choice)
