"""How far a packed weight is from the values that it was made of, measured on a sample of its rows."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.tensor.opaque import OpaqueTensor, opaque_to_final_tensor
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["SampledError"]

# Rows of a matrix that are compared, and items of a stack of matrices: both in even steps, so that all parts are seen.
_ROWS: Final = 64
_ITEMS: Final = 4


class SampledError:
    """Gathers squares over one weight, which may come in pieces.

    `relative` is ||values - packed|| / ||values||: of all rows where there are few, else of 64 to 127 of each matrix.
    """

    def __init__(self) -> None:
        self._difference = 0.0
        self._total = 0.0
        self._is_known = True

    @property
    def relative(self) -> float | None:
        """The error; None on meta, or when the class of the weight does not say what its rows are. 0 of zeros."""
        if not self._is_known:
            return None
        return float((self._difference / self._total) ** 0.5) if self._total else 0.0

    def add(self, values: torch.Tensor, packed: torch.Tensor) -> None:
        """Compare `values`, plain (..., N, K), with `packed`, of the same shape, of a class with an offload state."""
        if values.is_meta:
            self._is_known = False
            return
        if isinstance(packed, TransposedTensor):
            values, packed = values.transpose(-1, -2), packed.inner
        for true, found in _samples(values.detach(), packed):
            if found is None:
                self._is_known = False
                return
            wanted = true.to(torch.float32)
            self._total += float(torch.linalg.vector_norm(wanted)) ** 2
            self._difference += float(torch.linalg.vector_norm(found - wanted)) ** 2


def _samples(values: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Give pairs (some rows of `values`, the same of `packed` in f32), None for those that cannot be had alone."""
    count = values.shape[0]
    if values.dim() < 3:
        rows = slice(0, count, max(1, count // _ROWS))
        some = _cut(packed, rows)
        yield values[rows], None if some is None else opaque_to_final_tensor(some.to(torch.float32))
        return
    for item in range(0, count, max(1, count // _ITEMS)):
        some = _cut(packed, slice(item, item + 1))
        if some is None:
            yield values[item], None
        else:
            yield from _samples(values[item], some[0])


def _cut(packed: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """Give some rows of a tensor, as one of its class; None when its class does not keep rows apart."""
    if not isinstance(packed, OpaqueTensor):
        return packed[rows]
    if not isinstance(packed, SupportsOffloadState):
        return None
    kind: Any = type(packed)
    state = packed.to_offload_state()
    apart = kind.row_parts(state["meta"], tuple(packed.shape))
    if not apart:
        return None
    parts = {name: part[rows].contiguous() if name in apart else part for name, part in state["tensors"].items()}
    some: torch.Tensor = kind.from_offload_state(OffloadState(tag=state["tag"], tensors=parts, meta=state["meta"]))
    return some
