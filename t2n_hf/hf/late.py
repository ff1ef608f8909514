"""A matrix that is quantized when it is read, and not while its model is loaded.

Exporting reads each weight once, to write it: quantized any earlier it would be written to a spill and read back first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast, final

import torch

from t2n_hf.errors import QuantizationError, T2NError
from t2n_hf.hf.failures import raise_first
from t2n_hf.hf.packing import ItemPacker, keeps_rows_apart
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.sources import CheckpointSources, MappedPages
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import SpillContent
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.stored import StoredSource, spilled

__all__ = ["LateContent", "LateWeights"]

_ROWS_NBYTES: Final = 4 << 20


@final
class LateWeights:
    """All matrices of one model that are quantized when they are read.

    With `keeps` the first read leaves the packed values in the spill of `spill_folder`, and others read them there;
    without it each read quantizes.
    """

    def __init__(
        self, sources: CheckpointSources, pages: MappedPages, *, keeps: bool, spill_folder: str | Path | None
    ) -> None:
        self.keeps = keeps
        self.spill_folder = spill_folder
        self._sources = sources
        self._pages = pages
        self._contents: list[LateContent] = []
        self._failures: list[T2NError] | None = None

    def add(
        self, name: str, value: torch.Tensor, choice: Choice, *, key: str, dtype: torch.dtype
    ) -> StoredSource | None:
        """Give the source of the matrix `name`, which was loaded as `value` from `key` and is to act as `dtype`.

        Returns None when the checkpoint does not hold it as it is, or its class needs all of it at once.
        """
        stored, shape = self._sources.single(name, key), value.shape
        if stored is None or stored.shape != tuple(shape) or len(shape) != 2 or 0 in shape:
            return None
        if not keeps_rows_apart(choice, shape):
            return None
        if self._sources.torch_dtype(stored) != value.dtype:  # the loader has read it
            self._pages.used(max(value.nbytes, stored.nbytes))
        rounded = None if self._sources.wider(name, value, key) is not None else value.dtype
        content = LateContent(self, stored, rounded, choice, dtype=dtype, name=name)
        self._contents.append(content)
        return StoredSource(content, shape, dtype, name, spill_folder=self.spill_folder)

    def failures(self) -> list[T2NError]:
        """Quantize all of them, the first time, and give what goes wrong."""
        if self._failures is None:
            self._failures = [error for content in self._contents if (error := content.failure()) is not None]
        return self._failures


@final
class LateContent:
    """What an OffloadedTensor loads: a matrix in the user's file, quantized on the way, some rows at a time."""

    def __init__(
        self,
        owner: LateWeights,
        stored: ByteRange,
        rounded: torch.dtype | None,
        choice: Choice,
        *,
        dtype: torch.dtype,
        name: str,
    ) -> None:
        self._owner = owner
        self._stored = stored
        self._rounded = rounded
        self._choice = choice
        self._dtype = dtype
        self._name = name
        self._kept: SpillContent | None = None
        assert choice.format is not None
        self.nbytes = choice.format.packed_nbytes(stored.shape)

    @property
    def kind(self) -> type[OpaqueTensor] | None:
        """Class of the value."""
        return cast(type[OpaqueTensor], self._choice.format)

    @property
    def is_kept(self) -> bool:
        """Whether what a read gives is kept for others, or was."""
        return self._owner.keeps or self._kept is not None

    def read(self, device: torch.device) -> torch.Tensor:
        """Quantize all of it, or read what an earlier read kept.

        Raises StorageError; QuantizationError for this matrix or any other one of the model, naming all of them.
        """
        if self._kept is not None:
            return self._kept.read(device)
        with self._naming_all():
            packed = self.quantized()
        if self._owner.keeps:
            self._kept = spilled(packed, self._owner.spill_folder, self._name)
        return packed

    def packed_groups(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Quantize some rows after others, so many at a time as take about `nbytes` in the file. Nothing is kept.

        Raises as `read` does.
        """
        assert self._choice.format is not None
        with self._naming_all():
            for rows in self._row_groups(nbytes):
                yield self._choice.format.quantize(rows, dtype=self._dtype, name=self._name)

    @contextmanager
    def _naming_all(self) -> Iterator[None]:
        try:
            yield
        except QuantizationError:
            raise_first(self._owner.failures())
            raise

    def quantized(self) -> torch.Tensor:
        """Quantize all of it. Raises StorageError, and QuantizationError naming the weight."""
        packer = ItemPacker(self._stored.shape[0], self._choice, dtype=self._dtype, name=self._name)
        for rows in self._row_groups(_ROWS_NBYTES):
            packer.add(rows)
        return packer.finish("exact")

    def _row_groups(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Give the rows that are to be quantized in order, so many at a time as take about `nbytes` in the file.

        Raises StorageError.
        """
        count = self._stored.shape[0]
        step = max(1, nbytes // (self._stored.nbytes // count))
        for start in range(0, count, step):
            rows = self._stored.rows(start, min(start + step, count)).read()
            yield rows if self._rounded is None else rows.to(self._rounded)

    def failure(self) -> T2NError | None:
        """Quantize all of it, unless that was done, and give what goes wrong."""
        try:
            if self._kept is None:
                self.quantized()
        except T2NError as error:
            return error
        return None

    def gather(self, rows: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
        """Read rows of what was kept; None before."""
        return None if self._kept is None else self._kept.gather(rows, shape)

    def advise(self) -> None:
        """Let the system read ahead in the user's file, or the spill."""
        (self._stored if self._kept is None else self._kept).advise()
