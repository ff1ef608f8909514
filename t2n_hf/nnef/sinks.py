"""Where the members of an archive go: a folder, or a .tar or .tgz file, hashed while it is written."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from t2n_hf.nnef.dat import Buffer
from t2n_hf.nnef.deflate import GzipWriter
from t2n_hf.nnef.tar import END, padding, tar_header

__all__ = ["FolderSink", "HashedFile", "Sink", "TarSink", "WrittenFile"]

_VECTOR: Final = 512  # buffers per write call; systems allow 1024
_HASH_BESIDE_NBYTES: Final = 1 << 16  # below this, handing the hash to a thread costs more than it saves

WrittenFile: TypeAlias = tuple[str, int]
"""sha256 (hex) and size in bytes."""


class HashedFile:
    """A file being written, and the sha256 of what was written to it, computed beside the writing."""

    def __init__(self, path: Path, executor: ThreadPoolExecutor) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._executor = executor
        self._hash = hashlib.sha256()
        self._nbytes = 0

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after another; they may be reused when this returns."""
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if len(view)]
        nbytes = sum(map(len, views))
        self._nbytes += nbytes
        if nbytes < _HASH_BESIDE_NBYTES:
            self._update(views)
            self._write_all(views)
            return
        hashing = self._executor.submit(self._update, views)
        try:
            self._write_all(views)
        finally:
            hashing.result()  # the caller may reuse the buffers from here on

    def _update(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._hash.update(view)

    def _write_all(self, views: Sequence[memoryview]) -> None:
        for start in range(0, len(views), _VECTOR):
            group = views[start : start + _VECTOR]
            done = os.writev(self._file.fileno(), group) if hasattr(os, "writev") else 0
            for view in group:
                rest = view[min(done, len(view)) :]
                done -= len(view) - len(rest)
                while len(rest):
                    rest = rest[self._file.write(rest) :]

    def written(self) -> WrittenFile:
        """Return the sha256 and size of what was written so far."""
        return self._hash.hexdigest(), self._nbytes

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Sink(Protocol):
    """Takes the members of one archive; names and sizes are checked before."""

    def add(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> None:
        """Write one member, chunk by chunk."""
        ...

    def close(self) -> dict[str, WrittenFile]:
        """End the archive; return its files by name."""
        ...

    def cancel(self) -> None:
        """Let go of threads and descriptors. Harmless after `close`."""
        ...


class TarSink:
    """A .tar (`level` None) or a .tgz; `name` is its final file name."""

    def __init__(self, file: HashedFile, name: str, level: int | None) -> None:
        self._file = file
        self._name = name
        self._gzip = None if level is None else GzipWriter(file.write, level)
        self._write: Callable[[Buffer], None] = self._gzip.write if self._gzip else lambda chunk: file.write([chunk])

    def add(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> None:
        """See `Sink`."""
        self._write(tar_header(name, nbytes))
        for chunk in chunks:
            self._write(chunk)
        self._write(padding(nbytes))

    def close(self) -> dict[str, WrittenFile]:
        """See `Sink`."""
        self._write(END)
        if self._gzip is not None:
            self._gzip.close()
        self._file.close()
        return {self._name: self._file.written()}

    def cancel(self) -> None:
        """See `Sink`."""
        if self._gzip is not None:
            self._gzip.cancel()
        self._file.close()


class FolderSink:
    """A folder of plain files; `name` is its final name."""

    def __init__(self, folder: Path, name: str, executor: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._name = name
        self._executor = executor
        self._written: dict[str, WrittenFile] = {}

    def add(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> None:
        """See `Sink`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(HashedFile(path, self._executor)) as file:
            for chunk in chunks:
                file.write([chunk])
            self._written[f"{self._name}/{name}"] = file.written()

    def close(self) -> dict[str, WrittenFile]:
        """See `Sink`."""
        return self._written

    def cancel(self) -> None:
        """See `Sink`."""
