"""Which bytes of the checkpoint make up a parameter, and giving back the memory that reading them took."""

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from t2n_hf.dtypes import dtype_named
from t2n_hf.hf.key_map import map_keys
from t2n_hf.store.checkpoint import ByteRange

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

__all__ = ["CheckpointSources", "MappedPages", "total_nbytes"]

_MAPS: Final = Path("/proc/self/maps")
# Linux maps this much of a file around a byte that is read.
_READ_AROUND_NBYTES: Final = 64 << 10
# Trimming costs more than dropping pages, and packing asks for the memory again: a tenth of a loading's time.
_TRIMMED_EVERY: Final = 4


class CheckpointSources:
    """The byte ranges that each parameter of one model is loaded from."""

    def __init__(self, index: Mapping[str, ByteRange], model: "PreTrainedModel", quantizer: "HfQuantizer") -> None:
        self.index = index
        self._model = model
        self._quantizer = quantizer
        self._by_target: dict[str, list[tuple[str, str]]] | None = None

    @classmethod
    def by_name(cls, index: Mapping[str, ByteRange]) -> "CheckpointSources":
        """Give the sources of a module whose weights are in the checkpoint under the names that it has for them."""
        sources = object.__new__(cls)
        sources.index = index
        sources._by_target = {key: [(key, key)] for key in index}
        return sources

    def single(self, name: str, key: str | None = None) -> ByteRange | None:
        """Find the one range that holds parameter `name` as it is; `key` is its name in the checkpoint when known."""
        keys = [key] if key is not None and key in self.index else [key for _, key in self.of(name)]
        return self.index[keys[0]] if len(keys) == 1 else None

    def wider(self, name: str, value: torch.Tensor, key: str | None) -> ByteRange | None:
        """Find parameter `name` as it is stored when `value`, as it was loaded, is of a smaller float dtype."""
        found = None if key is None else self.single(name, key)
        if found is None or found.shape != tuple(value.shape):
            return None
        stored = self.torch_dtype(found)
        return found if stored.itemsize > value.dtype.itemsize and stored.is_floating_point else None

    def rows(self, name: str, value: torch.Tensor) -> list[ByteRange] | None:
        """Find the ranges whose bytes, one after the other, are those of `value` (E, ...): fused experts.

        Checked on the first and the last expert: a rule that also transposes gives None.
        """
        groups: dict[str, list[ByteRange]] = {}
        for pattern, key in self.of(name):
            groups.setdefault(pattern, []).append(self.index[key])
        if value.dim() < 2 or not groups or any(len(group) != value.shape[0] for group in groups.values()):
            return None
        ranges = [group[row] for row in range(value.shape[0]) for group in groups.values()]
        if len({r.dtype for r in ranges}) > 1 or sum(math.prod(r.shape) for r in ranges) != value.numel():
            return None
        width = len(groups)
        for row in (0, value.shape[0] - 1):
            parts = [r.read().reshape(-1).to(value.dtype) for r in ranges[row * width : (row + 1) * width]]
            if not torch.equal(torch.cat(parts), value[row].reshape(-1)):
                return None
        return ranges

    def of(self, name: str) -> Sequence[tuple[str, str]]:
        """Give (pattern, key) of every tensor of the checkpoint that goes into parameter `name`, in loading order."""
        if self._by_target is None:
            self._by_target = map_keys(self._model, self._quantizer, self.index).by_target
        return self._by_target.get(name, ())

    @staticmethod
    def torch_dtype(byte_range: ByteRange) -> torch.dtype:
        """Give the dtype of a range as torch has it."""
        dtype: torch.dtype = getattr(torch, dtype_named(byte_range.dtype).torch)
        return dtype


class MappedPages:
    """The pages of memory-mapped checkpoint files that loading brings in, and giving them back.

    The loader maps a checkpoint and keeps the mapping while it loads, so that every byte that was quantized would count
    as memory in use. Pages given back are read again when they are needed. Mappings that exist when this is made belong
    to others, who may have written to them, and are left alone. Does nothing where the system has no such call.
    """

    def __init__(self, files: Iterable[str | Path], every_nbytes: int = 16 << 20) -> None:
        self._files = {os.path.realpath(file) for file in files}
        self._others = {start for start, _ in self._mappings()}
        self._every_nbytes = every_nbytes
        self._pending = self._dropped = 0

    def used(self, nbytes: int, *, packing: bool = False) -> None:
        """Count `nbytes` that are needed no more; give the pages back when enough have come together.

        With `packing` memory that is free is kept three times of four: packing the next weight asks for as much again.
        """
        self._pending += nbytes
        if self._pending >= self._every_nbytes:
            self._pending = 0
            self._dropped += 1
            self.drop(trim=not packing or self._dropped % _TRIMMED_EVERY == 0)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give small plain tensors, such as norms and biases, memory of their own where they lie in the mappings.

        To read one brings in more of the file than it has; the pages of all norms are megabytes. Each is changed in
        place (`.data`).
        """
        ours = [(start, stop) for start, stop in self._mappings() if start not in self._others]
        for tensor in tensors:
            plain = tensor.detach()
            if type(plain) is not torch.Tensor or plain.device.type != "cpu" or plain.nbytes > _READ_AROUND_NBYTES:
                continue
            if any(start <= plain.data_ptr() < stop for start, stop in ours):
                tensor.data = plain.clone()

    def drop(self, *, trim: bool = True) -> None:
        """Give back every page of the mappings made since, and, with `trim`, memory that is free."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        for start, stop in self._mappings():
            if start not in self._others:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
        # What the loader cast, and what quantizing needed, is free but kept by the C library between smaller blocks.
        if trim and hasattr(libc, "malloc_trim"):
            libc.malloc_trim(ctypes.c_size_t(0))

    def _mappings(self) -> list[tuple[int, int]]:
        if not _MAPS.exists():
            return []
        found, files = [], tuple(self._files)
        for line in _MAPS.read_text().splitlines():
            fields = line.split(None, 5) if line.endswith(files) else ()
            if len(fields) == 6 and fields[5] in self._files:
                start, stop = fields[0].split("-")
                found.append((int(start, 16), int(stop, 16)))
        return found


def total_nbytes(ranges: Iterable[ByteRange]) -> int:
    """Bytes of several ranges together."""
    return sum(r.nbytes for r in ranges)
