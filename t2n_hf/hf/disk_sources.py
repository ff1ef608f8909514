"""A packed weight that stays in the checkpoint it was saved in, its parts being tensors of that."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from t2n_hf.contract import OffloadState
from t2n_hf.errors import FormatError
from t2n_hf.hf.stored import StoredForm
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import RangeContent, rebuilt_rows, row_parts_of
from t2n_hf.tensor.opaque import OpaqueTensor

__all__ = ["StoredParts"]


@final
class StoredParts:
    """What an OffloadedTensor loads: the parts of `form`, each at its range of the user's files.

    `kind` is the class of the form's tag. Raises FormatError when a part is missing.
    """

    def __init__(self, name: str, form: StoredForm, ranges: Mapping[str, ByteRange], kind: Any) -> None:  # noqa: ANN401
        missing = set(form.parts) - set(ranges)
        if missing:
            raise FormatError(f"{name}: the checkpoint lacks its parts {', '.join(sorted(missing))}")
        self._kind = kind
        self._form = form
        self._ranges = dict(ranges)

    @property
    def kind(self) -> type[OpaqueTensor] | None:
        """Class of the value."""
        kind: type[OpaqueTensor] = self._kind
        return kind

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self._ranges.values())

    def read(self, device: torch.device) -> torch.Tensor:
        """Read the parts and rebuild the weight on `device`. Raises StorageError."""
        tensors = {name: part.read() for name, part in self._ranges.items()}
        state = OffloadState(tag=self._form.tag, tensors=tensors, meta=dict(self._form.meta))
        rebuilt: torch.Tensor = self._kind.from_offload_state(state, device)
        return rebuilt

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Read the rows of the parts that the class says have some, and rebuild a weight of these alone."""
        names = row_parts_of(self._kind, self._form.meta, shape)
        if not names:
            return None
        tensors = {
            name: RangeContent([part], part.shape).gather(rows, shape) if name in names else part.read()
            for name, part in self._ranges.items()
        }
        state = {"tag": self._form.tag, "tensors": tensors, "meta": dict(self._form.meta)}
        return rebuilt_rows(self._kind, state, len(rows), shape)

    def advise(self) -> None:
        """Let the system read ahead in the user's files."""
        for part in self._ranges.values():
            part.advise()
