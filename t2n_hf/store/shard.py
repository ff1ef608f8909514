"""Writing a safetensors file whose tensors come in any order, each in chunks, and may have been begun by an older run.

The header is made beforehand, from names, dtypes and shapes; the bytes are those that the safetensors library writes.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from typing_extensions import Self

from t2n_hf.atomic import WRITE_NBYTES
from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import FormatError, StorageError
from t2n_hf.store.memory import aligned_buffer, bytes_of, read_at

__all__ = ["ShardFile", "ShardLayout", "TensorSpec"]

_ALIGNMENT: Final = 8
_READ_NBYTES: Final = 8 << 20
# The library puts wide types first, in this order, then goes by name: so each tensor is aligned for its type.
_ORDER: Final = {
    name: place for place, name in enumerate(("i64", "f64", "f32", "i32", "bf16", "f16", "i16", "i8", "u8", "bool"))
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: `dtype` is its name in tract ("bf16"), `shape` is row major."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * dtype_named(self.dtype).nbytes


class ShardLayout:
    """Where each tensor of one file goes. `header` is what the file begins with; offsets count from its start."""

    def __init__(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self.tensors = dict(tensors)
        described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        begins: dict[str, int] = {}
        position = 0
        for name in sorted(self.tensors, key=lambda name: (_ORDER[self.tensors[name].dtype], name.encode())):
            spec, begin = self.tensors[name], position
            begins[name], position = begin, begin + spec.nbytes
            described[name] = {
                "dtype": spec.dtype.upper(),
                "shape": list(spec.shape),
                "data_offsets": [begin, position],
            }
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.header: bytes = len(text).to_bytes(8, "little") + text
        self.offsets = {name: len(self.header) + begin for name, begin in begins.items()}
        self.nbytes = len(self.header) + position


class ShardFile:
    """One file while it is written. Made in its full size; an older one of that size is gone on with.

    A context manager. Raises OSError as the system does: on a full disk, among others.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.path = path
        self.layout = layout
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._fd = os.open(path, flags, 0o666)
        self._done: dict[str, tuple[int, int]] = {}
        try:
            os.ftruncate(self._fd, layout.nbytes)
            self._write_at(memoryview(layout.header), 0)
        except BaseException:
            self.close()
            raise

    def restart(self, names: Iterable[str]) -> None:
        """Forget what was appended to tensors `names`."""
        for name in names:
            self._done.pop(name, None)

    def append(self, name: str, chunk: memoryview) -> None:
        """Write the next bytes of tensor `name`. Raises FormatError beyond what its shape and dtype say."""
        written, checksum = self._done.get(name, (0, 0))
        if written + len(chunk) > self.layout.tensors[name].nbytes:
            raise FormatError(f"{name}: more bytes than {self.layout.tensors[name]} has")
        self._write_at(chunk, self.layout.offsets[name] + written)
        self._done[name] = (written + len(chunk), zlib.crc32(chunk, checksum))

    def checksum(self, name: str) -> int:
        """Give the CRC-32 of tensor `name` as it was appended. Raises FormatError when bytes are missing."""
        written, checksum = self._done.get(name, (0, 0))
        if written != self.layout.tensors[name].nbytes:
            raise FormatError(f"{name}: {written} of {self.layout.tensors[name].nbytes} bytes were written")
        return checksum

    def read_checksum(self, name: str) -> int:
        """Compute the CRC-32 of the bytes that are in the file for tensor `name`. Raises StorageError."""
        offset, left = self.layout.offsets[name], self.layout.tensors[name].nbytes
        buffer = bytes_of(aligned_buffer(min(left, _READ_NBYTES))) if left else memoryview(b"")
        checksum = 0
        while left:
            part = buffer[: min(left, _READ_NBYTES)]
            got = read_at(self._fd, part, offset)
            if got == 0:
                raise StorageError(
                    f"{self.path} is truncated at byte {offset}; start again without it (resume=False, --no-resume)"
                )
            checksum = zlib.crc32(part[:got], checksum)
            offset, left = offset + got, left - got
        return checksum

    def sync(self) -> None:
        """Have the system bring everything to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Doing it twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_at(self, view: memoryview, offset: int) -> None:
        while view:
            done = os.pwrite(self._fd, view[:WRITE_NBYTES], offset)
            view, offset = view[done:], offset + done
