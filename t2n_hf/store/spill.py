"""A private file for tensors that leave memory for a while. It has no name, and is gone when the process is."""

import contextlib
import os
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from t2n_hf.atomic import WRITE_NBYTES
from t2n_hf.errors import StorageError
from t2n_hf.store.disk_space import cut, punch_hole
from t2n_hf.store.memory import ALIGNMENT, aligned_buffer, bytes_of, read_at, runs_of, tensor_chunks
from t2n_hf.store.state import StoredState

__all__ = ["Spill", "SpillRange", "shared_spill"]

_CHUNK_NBYTES: Final = 64 << 20
_PREFIX: Final = "t2n-spill-"
_LEFTOVER_SECONDS: Final = 60  # a file in use has no name for longer than an instant
# Every spill of this process, and the shared ones by process and folder. The lock is held while the process forks.
_ALL: Final["weakref.WeakSet[Spill]"] = weakref.WeakSet()
_SHARED: Final["weakref.WeakValueDictionary[tuple[int, str], Spill]"] = weakref.WeakValueDictionary()
_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class _Part:
    name: str
    offset: int  # in the range
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class SpillRange:
    """A tensor or an offload state in a spill. Its space is used again when nothing refers to the range any more."""

    def __init__(
        self, spill: "Spill", offset: int, parts: tuple[_Part, ...], state: tuple[str, dict[str, Any]] | None
    ) -> None:
        self._spill = spill
        self._offset = offset
        self._parts = parts
        self._state = state
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def meta(self) -> Mapping[str, Any] | None:
        """The meta of a state; None for a plain tensor, whose one part is called ""."""
        return None if self._state is None else self._state[1]

    def read(self) -> Any:  # noqa: ANN401 - what was put: a tensor or a state
        """Return what was put, in fresh memory (64-byte aligned, CPU). Raises StorageError."""
        return self._made_of({part.name: self._read(part) for part in self._parts})

    def read_rows(self, rows: Sequence[int], names: Collection[str]) -> Any:  # noqa: ANN401 - as `read`
        """Return what was put, the parts called `names` cut to `rows` (ascending) of their first axis.

        Of these parts nothing else is read. Raises StorageError.
        """
        runs = runs_of(rows)
        tensors = {
            part.name: self._read_rows(part, runs, len(rows)) if part.name in names else self._read(part)
            for part in self._parts
        }
        return self._made_of(tensors)

    def _made_of(self, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401 - a tensor or a state
        if self._state is None:
            return tensors[""]
        tag, meta = self._state
        return cast(StoredState, {"tag": tag, "tensors": tensors, "meta": dict(meta)})

    def advise(self) -> None:
        """Tell the system that these bytes are needed soon. Does nothing where that cannot be told."""
        self._spill._advise(self._offset, self.nbytes)

    def _read(self, part: _Part) -> torch.Tensor:
        buffer = aligned_buffer(part.nbytes)
        self._spill._read_into(bytes_of(buffer), self._offset + part.offset)
        return buffer.view(part.dtype).view(part.shape)

    def _read_rows(self, part: _Part, runs: Sequence[tuple[int, int]], count: int) -> torch.Tensor:
        row = part.nbytes // part.shape[0]
        buffer = aligned_buffer(row * count)
        view, place = bytes_of(buffer), self._offset + part.offset
        for start, stop in runs:
            nbytes = (stop - start) * row
            self._spill._read_into(view[:nbytes], place + start * row)
            view = view[nbytes:]
        return buffer.view(part.dtype).view(count, *part.shape[1:])


class Spill:
    """An unlinked temporary file in `folder` (None: the system's), used by any thread; a context manager.

    Freed space goes back to the disk, or is used again by later values that fit. Copies of a model share the file, as
    what is in it never changes.
    Raises StorageError when the folder cannot be written.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._where = "the system's folder for temporary files" if folder is None else str(folder)
        place = "spill_dir or offload_dir of the call, --spill-dir, or TMPDIR"
        self._elsewhere = f"name another folder ({place})" if folder is None else "name another folder in its place"
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            _remove_leftovers(Path(folder or tempfile.gettempdir()))
            # TemporaryFile has no name from the start. Where the system cannot do that it loses its name at once: a
            # process that is killed just then leaves an empty file, which the next spill in the folder removes.
            with tempfile.TemporaryFile(prefix=_PREFIX, dir=folder) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise StorageError(
                error.errno, f"cannot make a spill file in {self._where}: {error.strerror}; {self._elsewhere}"
            ) from error
        if folder is None:
            self._where = tempfile.gettempdir()
        # A forked child reads what its parent has put; it writes to files of its own.
        self._owner = os.getpid()
        self._read_by_children = 0
        self._close = weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, int] = {}  # offset -> bytes
        # Ranges end whenever the garbage collector runs, perhaps inside `put`: they queue here, and wait for no lock.
        self._returned: deque[tuple[int, int]] = deque()
        with _LOCK:
            _ALL.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the file to the end of the last value, free space between values included."""
        return self._end

    def put(self, value: torch.Tensor | StoredState | Mapping[str, Any]) -> SpillRange:
        """Write a plain tensor or an offload state; the values of other devices are copied over in chunks.

        Raises StorageError on a full disk or a closed spill, and in a forked child, whose parent's file it is.
        """
        if self._owner != os.getpid():
            raise StorageError(f"the spill in {self._where} is that of process {self._owner}; make one in this process")
        if isinstance(value, torch.Tensor):
            tensors, state = {"": value}, None
        else:
            tensors, state = value["tensors"], (value["tag"], dict(value["meta"]))
        parts, nbytes = [], 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            parts.append(_Part(name, nbytes, size, tensor.dtype, tensor.shape))
            nbytes += size + -size % ALIGNMENT
        offset = self._allocate(nbytes)
        try:
            for part, tensor in zip(parts, tensors.values(), strict=True):
                self._write(part.name, tensor, offset + part.offset)
        except BaseException:
            self._take_back(offset, nbytes)
            raise
        stored = SpillRange(self, offset, tuple(parts), state)
        weakref.finalize(stored, self._take_back, offset, nbytes).atexit = False
        return stored

    def close(self) -> None:
        """Give the disk space back. Ranges can no longer be read. Also done when nothing refers to the spill."""
        self._close()

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spill":
        return self

    def _allocate(self, nbytes: int) -> int:
        with self._lock:
            self._give_back_returned()
            fitting = [(size, offset) for offset, size in self._free.items() if size >= nbytes]
            if not fitting:
                offset, self._end = self._end, self._end + nbytes
                return offset
            size, offset = min(fitting)
            del self._free[offset]
            if size > nbytes:
                self._free[offset + nbytes] = size - nbytes
            return offset

    def _take_back(self, offset: int, nbytes: int) -> None:
        # What a child could still read stays until the last process closes the file; so does all that a parent has.
        if offset < self._read_by_children or self._owner != os.getpid():
            return
        self._returned.append((offset, nbytes))
        if self._lock.acquire(blocking=False):  # else who holds it, or comes next, does it
            try:
                self._give_back_returned()
            finally:
                self._lock.release()

    def _give_back_returned(self) -> None:
        while self._returned:
            offset, nbytes = self._returned.popleft()
            self._join_free(offset, nbytes)
            if not self._close.alive:
                continue
            if self._end <= offset:
                cut(self._fd, self._end)
            else:
                punch_hole(self._fd, offset, nbytes)

    def _join_free(self, offset: int, nbytes: int) -> None:
        for start, size in list(self._free.items()):
            if start + size == offset:
                del self._free[start]
                offset, nbytes = start, nbytes + size
            elif offset + nbytes == start:
                nbytes += self._free.pop(start)
        if offset + nbytes == self._end:
            self._end = offset
        elif nbytes:
            self._free[offset] = nbytes

    def _write(self, name: str, tensor: torch.Tensor, offset: int) -> None:
        for view in tensor_chunks(tensor, name):
            while view:
                self._check_open()
                try:
                    done = os.pwrite(self._fd, view[:WRITE_NBYTES], offset)
                except OSError as error:
                    raise StorageError(
                        error.errno,
                        f"cannot spill {len(view)} bytes in {self._where}: {error.strerror}; "
                        f"free some space, or {self._elsewhere}",
                    ) from error
                view, offset = view[done:], offset + done

    def _read_into(self, view: memoryview, offset: int) -> None:
        while view:
            self._check_open()
            try:
                done = read_at(self._fd, view[:_CHUNK_NBYTES], offset)
            except OSError as error:
                raise StorageError(
                    error.errno, f"cannot read {len(view)} bytes of the spill file in {self._where}: {error.strerror}"
                ) from error
            if not done:
                raise StorageError(f"the spill file in {self._where} ends at byte {offset}; it was truncated")
            view, offset = view[done:], offset + done

    def _advise(self, offset: int, nbytes: int) -> None:
        if nbytes and hasattr(os, "posix_fadvise") and self._close.alive:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise StorageError(f"the spill in {self._where} was closed; load the model again")


def _remove_leftovers(folder: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _LEFTOVER_SECONDS:
                    os.unlink(entry.path)


def shared_spill(folder: str | Path | None) -> Spill:
    """Give the spill of this process for `folder` (None: the system's temporary one); it ends with its last range."""
    key = (os.getpid(), "" if folder is None else os.path.realpath(folder))
    with _LOCK:
        known = _SHARED.get(key)
    if known is not None:
        return known
    made = Spill(folder)
    with _LOCK:
        return _SHARED.setdefault(key, made)


def _after_fork_in_parent() -> None:
    for spill in list(_ALL):
        spill._read_by_children = spill._end
    _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_after_fork_in_parent, after_in_child=_LOCK.release)
