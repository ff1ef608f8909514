"""Where the members of an archive go: a folder, or a .tar or .tgz file, written and hashed behind the caller."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from t2n_hf.atomic import WRITE_NBYTES, sync_to_disk
from t2n_hf.nnef.dat import Buffer
from t2n_hf.nnef.deflate import GzipWriter
from t2n_hf.nnef.tar import END, padding, tar_header

__all__ = ["FolderSink", "HashedFile", "Sink", "TarSink", "WriteBehind", "WrittenFile", "write_behind"]

# Small enough to stay in the processor's caches until they are written and hashed; handing one over takes 0.1 ms.
_BUFFER_NBYTES: Final = 2 << 20
_BUFFERS: Final = 4
# What is written is sent to the disk in such portions, so that little is left to wait for in the end.
_SYNC_NBYTES: Final = 64 << 20

WrittenFile: TypeAlias = tuple[str, int]
"""sha256 (hex) and size in bytes."""


class WriteBehind:
    """Threads for files that are written one after another, and buffers that are written while others are filled.

    One thread writes, one hashes, and one waits for the disk.
    """

    def __init__(self, writer: ThreadPoolExecutor, hasher: ThreadPoolExecutor, syncer: ThreadPoolExecutor) -> None:
        self.writer = writer
        self.hasher = hasher
        self.syncer = syncer
        self.buffers = [memoryview(bytearray(_BUFFER_NBYTES)) for _ in range(_BUFFERS)]


@contextlib.contextmanager
def write_behind() -> Iterator[WriteBehind]:
    """Give threads for the files of one archive. They end with the block."""
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as syncer:
        yield WriteBehind(writer, hasher, syncer)


class HashedFile:
    """A file that is written and hashed by the threads of `behind`, which serve one file at a time.

    A large archive is one long stream: the disk's share and the hash's then cost no time of whoever makes the bytes.
    What goes wrong behind is raised by a later call.
    """

    def __init__(self, path: Path, behind: WriteBehind) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._behind = behind
        self._hash = hashlib.sha256()
        self._nbytes = 0
        self._place = 0
        self._filled = 0
        self._busy: list[tuple[Future[Any], ...]] = [()] * len(behind.buffers)
        self._unsynced = 0
        self._syncing: tuple[Future[Any], ...] = ()

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after another; they may be reused when this returns."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            self._nbytes += len(view)
            while len(view):
                into = self._behind.buffers[self._place]
                part = view[: len(into) - self._filled]
                into[self._filled : self._filled + len(part)] = part
                self._filled += len(part)
                view = view[len(part) :]
                if self._filled == len(into):
                    self._hand_over()

    def _hand_over(self) -> None:
        """Let the current buffer be written and hashed, and wait for the next one to be free."""
        full = self._behind.buffers[self._place][: self._filled]
        writing = self._behind.writer.submit(self._write, full)
        self._busy[self._place] = (writing, self._behind.hasher.submit(self._hash.update, full))
        self._place, self._filled = (self._place + 1) % len(self._busy), 0
        _results(self._busy[self._place])

    def _write(self, view: memoryview) -> None:
        self._unsynced += len(view)
        while len(view):
            view = view[self._file.write(view[:WRITE_NBYTES]) :]
        if self._unsynced >= _SYNC_NBYTES and all(task.done() for task in self._syncing):
            _results(self._syncing)
            self._syncing = (self._behind.syncer.submit(sync_to_disk, self._file.fileno()),)
            self._unsynced = 0

    def finish(self) -> WrittenFile:
        """Write what is left and close the file. Returns its sha256 and size."""
        self._hand_over()
        for tasks in self._busy:
            _results(tasks)
        _results(self._syncing)
        self._file.close()
        return self._hash.hexdigest(), self._nbytes

    def close(self) -> None:
        """Close the file, whatever was written. Harmless after `finish`."""
        wait([task for tasks in self._busy for task in tasks])
        wait(self._syncing)
        self._file.close()


def _results(tasks: Iterable[Future[Any]]) -> None:
    """Wait for tasks, and raise what went wrong."""
    for task in tasks:
        task.result()


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
        return {self._name: self._file.finish()}

    def cancel(self) -> None:
        """See `Sink`."""
        if self._gzip is not None:
            self._gzip.cancel()
        self._file.close()


class FolderSink:
    """A folder of plain files; `name` is its final name."""

    def __init__(self, folder: Path, name: str, behind: WriteBehind) -> None:
        self._folder = folder
        self._name = name
        self._behind = behind
        self._written: dict[str, WrittenFile] = {}

    def add(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> None:
        """See `Sink`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(HashedFile(path, self._behind)) as file:
            for chunk in chunks:
                file.write([chunk])
            self._written[f"{self._name}/{name}"] = file.finish()

    def close(self) -> dict[str, WrittenFile]:
        """See `Sink`."""
        return self._written

    def cancel(self) -> None:
        """See `Sink`."""
