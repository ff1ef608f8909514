"""Byte ranges of existing safetensors files: read where they are, never copied, never written.

A file is opened once, when the checkpoint is, and its descriptor is held: bytes keep coming from the file that was
opened even when another one takes its name, and a change of the file itself is noticed.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import torch

from t2n_hf.dtypes import DTYPES, dtype_named
from t2n_hf.errors import CheckpointNotFoundError, FormatError, StorageError
from t2n_hf.store.header import load_json_object, parse_header
from t2n_hf.store.memory import aligned_buffer, bytes_of, read_at

__all__ = ["ByteRange", "CheckpointFile", "CheckpointIndex", "read_ranges"]

_READ_NBYTES: Final = 256 << 20  # one read call moves less than 2 GiB, and a signal waits for it
_INDEX_SUFFIX: Final = ".safetensors.index.json"


class CheckpointFile:
    """One open safetensors file: a mapping of tensor names to byte ranges, checked against the file's size.

    Raises StorageError when the file ends early, FormatError when its header is not what safetensors allows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():  # opening a pipe would wait for ever
            raise StorageError(f"{self.path} is no file; expected safetensors weights there")
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.path} does not exist") from error
        except OSError as error:
            raise StorageError(error.errno, f"cannot open {self.path}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        try:
            self._stamp = _stamp(self._fd)
            self._was_short = False
            self.metadata, self._entries = parse_header(
                self.path, self._stamp[0], lambda nbytes, offset: os.pread(self._fd, nbytes, offset)
            )
        except BaseException:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        """Tensor names in the order of their bytes, which is the fast order to read them in."""
        return tuple(sorted(self._entries, key=lambda name: self._entries[name].begin))

    def byte_range(self, name: str) -> "ByteRange":
        """Return where tensor `name` is. Raises KeyError for an unknown name, FormatError for a dtype not supported."""
        entry = self._entries[name]
        known = {_SAFETENSORS_NAME[dtype]: dtype for dtype in DTYPES}
        if entry.dtype not in known:
            raise FormatError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which is not supported; "
                f"supported: {', '.join(sorted(known))}. Save the checkpoint in one of them first"
            )
        return ByteRange(self, entry.begin, entry.end - entry.begin, known[entry.dtype], entry.shape, name)

    def verify(self, what: str = "") -> None:
        """Raise StorageError when the file was written to (size or time) since it was opened, or was closed.

        A file that was found truncated and then has its size and its header again counts as restored.
        """
        self._check_open(what)
        now = _stamp(self._fd)
        if self._was_short and now[0] == self._stamp[0] and self._header_is_the_same():
            self._stamp, self._was_short = now, False
        if now != self._stamp:
            self._was_short = self._was_short or now[0] < self._stamp[0]
            raise StorageError(
                f"{self.path}{what} changed since it was opened: size {self._stamp[0]} then, {now[0]} now, "
                f"modified at {self._stamp[1]} ns then, {now[1]} ns now; load the checkpoint again"
            )

    def _header_is_the_same(self) -> bool:
        try:
            found = parse_header(self.path, self._stamp[0], lambda nbytes, offset: os.pread(self._fd, nbytes, offset))
        except (OSError, FormatError):
            return False
        return found == (self.metadata, self._entries)

    def read_into(self, view: memoryview, offset: int, what: str = "") -> None:
        """Fill `view` with the bytes at `offset`. Raises StorageError on a short read, I/O error or changed file."""
        self.read_pieces([(view, offset)], what)

    def read_pieces(self, pieces: Iterable[tuple[memoryview, int]], what: str = "") -> None:
        """Fill each view with the bytes at its offset; whether the file changed is asked once, when all are read.

        Raises StorageError as `read_into` does. The views then hold anything.
        """
        self._check_open(what)
        for view, offset in pieces:
            self._fill(view, offset, what)
        self.verify(what)

    def _fill(self, view: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + _READ_NBYTES]
            try:
                got = read_at(self._fd, part, offset + done)
            except OSError as error:
                raise StorageError(error.errno, f"cannot read {self.path}{what}: {error.strerror}") from error
            if got == 0:
                self.verify(what)
                raise StorageError(f"{self.path}{what} is truncated: no byte at {offset + done}; fetch the file again")
            done += got

    def _check_open(self, what: str) -> None:
        if not self._finalizer.alive:
            raise StorageError(f"{self.path}{what}: the file was closed; load the checkpoint again")

    def map_pages(self, offset: int, nbytes: int, what: str = "") -> mmap.mmap:
        """Map bytes, private and copy on write; `offset` is a multiple of the page size. Raises StorageError."""
        self.verify(what)
        try:
            return mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_COPY, offset=offset)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot map {self.path}{what}: {error}") from error

    def advise(self, offset: int, nbytes: int, how: Literal["willneed", "dontneed"] = "willneed") -> None:
        """Tell the system that a range is needed soon, or no more. Does nothing where that cannot be told."""
        # A length of 0 would mean the rest of the file.
        if nbytes and hasattr(os, "posix_fadvise") and self._finalizer.alive:
            advice = os.POSIX_FADV_WILLNEED if how == "willneed" else os.POSIX_FADV_DONTNEED
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, nbytes, advice)

    def close(self) -> None:
        """Close the descriptor; ranges of this file cannot be read any more. Also done when nothing refers to it."""
        self._finalizer()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"CheckpointFile({str(self.path)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointFile":
        """Copies of a model share the open file: nothing about it changes."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """An open file has no meaning in another process, and a path alone may name other bytes there."""
        raise TypeError(f"{self!r} is an open file and cannot be pickled; save the model with save_pretrained")


_SAFETENSORS_NAME: Final = {name: name.upper() for name in DTYPES}


@dataclass(frozen=True)
class ByteRange:
    """A tensor inside an open safetensors file.

    `offset` counts from the start of the file, `dtype` is the name in tract ("f32", "bf16"), `shape` is row major.
    """

    file: CheckpointFile
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    name: str = ""

    @property
    def _what(self) -> str:
        return f", tensor {self.name!r}," if self.name else ""

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read the tensor into fresh memory, 64-byte aligned, or into `out` (plain, contiguous, CPU, as many bytes).

        Returns a tensor of this shape and dtype; with `out` it shares its memory. Raises StorageError.
        """
        if out is None:
            flat = aligned_buffer(self.nbytes)
        elif out.device.type != "cpu" or not out.is_contiguous() or out.nbytes != self.nbytes:
            raise ValueError(
                f"out must be contiguous, on the CPU and of {self.nbytes} bytes, got {out.nbytes} bytes on {out.device}"
            )
        else:
            flat = out.detach().reshape(-1).view(torch.uint8)
        if self.nbytes:
            self.file.read_into(bytes_of(flat), self.offset, self._what)
        return flat.view(getattr(torch, dtype_named(self.dtype).torch)).view(self.shape)

    def mapped(self) -> torch.Tensor:
        """Give the tensor over mapped pages (private, copy on write): they come in when they are read, as page cache.

        For passing values on to a writer. The file must not be truncated meanwhile. Raises StorageError.
        """
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        torch_dtype = getattr(torch, dtype_named(self.dtype).torch)
        if not self.nbytes or self.offset % torch_dtype.itemsize:
            return self.read()
        pages = self.file.map_pages(start, self.offset + self.nbytes - start, self._what)
        flat = torch.frombuffer(pages, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)
        return flat.view(torch_dtype).view(self.shape)

    def chunks(self, nbytes: int = 8 << 20) -> Iterator[memoryview]:
        """Give the bytes in order, at most `nbytes` at a time. The next chunk overwrites the last one.

        Raises StorageError.
        """
        buffer = bytes_of(aligned_buffer(min(nbytes, self.nbytes)))
        for start in range(0, self.nbytes, nbytes):
            chunk = buffer[: min(nbytes, self.nbytes - start)]
            self.file.read_into(chunk, self.offset + start, self._what)
            yield chunk

    def rows(self, start: int, stop: int) -> "ByteRange":
        """Return the range of rows `start` to `stop` of the first axis. Raises IndexError outside of it."""
        if not (self.shape and 0 <= start <= stop <= self.shape[0]):
            raise IndexError(f"rows {start} to {stop} of tensor {self.name!r} of shape {list(self.shape)}")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (stop - start, *self.shape[1:])
        return ByteRange(self.file, self.offset + start * row, (stop - start) * row, self.dtype, shape, self.name)

    def advise(self, how: Literal["willneed", "dontneed"] = "willneed") -> None:
        """Tell the system that these bytes are needed soon, or no more. Does nothing where that cannot be told."""
        self.file.advise(self.offset, self.nbytes, how)

    def verify(self) -> None:
        """Raise StorageError when the file was written to since it was opened."""
        self.file.verify(self._what)


def read_ranges(ranges: Iterable[ByteRange], buffer: torch.Tensor) -> None:
    """Read ranges one after the other into `buffer` (uint8, 1-D, CPU), each file being checked once.

    Raises StorageError.
    """
    view, place = bytes_of(buffer), 0
    pieces: dict[CheckpointFile, list[tuple[memoryview, int]]] = {}
    names: dict[CheckpointFile, str] = {}
    for part in ranges:
        pieces.setdefault(part.file, []).append((view[place : place + part.nbytes], part.offset))
        names.setdefault(part.file, part._what)
        place += part.nbytes
    for file, wanted in pieces.items():
        file.read_pieces(wanted, names[file])


class CheckpointIndex(Mapping[str, ByteRange]):
    """All tensors of a checkpoint, by name, over one or more open safetensors files."""

    def __init__(self, files: Iterable[CheckpointFile]) -> None:
        self.files = tuple(files)
        self._owner: dict[str, CheckpointFile] = {}
        for file in self.files:
            for name in file.names():
                if name in self._owner:
                    raise FormatError(
                        f"tensor {name!r} is in {self._owner[name].path} and in {file.path}; remove one of them"
                    )
                self._owner[name] = file

    @classmethod
    def open(cls, source: str | Path | Iterable[str | Path]) -> "CheckpointIndex":
        """Open a model folder, a `.safetensors` file, an `.index.json`, or a list of `.safetensors` files.

        Raises CheckpointNotFoundError when there are no safetensors weights, StorageError for a missing or truncated
        shard, FormatError for shards that contradict each other, their index or the format.
        """
        if not isinstance(source, (str, Path)):
            return cls([CheckpointFile(path) for path in source])
        path = Path(source)
        if path.is_dir():
            path = _main_file(path)
        if path.name.endswith(".index.json"):
            return cls._open_shards(path)
        return cls([CheckpointFile(path)])

    @classmethod
    def _open_shards(cls, index_path: Path) -> "CheckpointIndex":
        weight_map = _read_weight_map(index_path)
        files: dict[str, CheckpointFile] = {}
        for shard in sorted(set(weight_map.values())):
            path = index_path.with_name(shard)
            if not path.exists():
                first = next(name for name, of in weight_map.items() if of == shard)
                raise StorageError(
                    f"{path} is missing; {index_path} says that it holds tensor {first!r}; fetch the file again"
                )
            files[shard] = CheckpointFile(path)
        for name, shard in weight_map.items():
            if name not in files[shard]:
                raise FormatError(f"{files[shard].path} does not hold tensor {name!r}, though {index_path} says so")
        return cls(files.values())

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def __getitem__(self, name: str) -> ByteRange:
        return self._owner[name].byte_range(name)

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


def _main_file(folder: Path) -> Path:
    for name in ("model.safetensors", f"model{_INDEX_SUFFIX}"):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob(f"*{_INDEX_SUFFIX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointNotFoundError(f"{folder} holds several sets of weights ({names}); leave one of them there")
    other = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    if other:
        raise CheckpointNotFoundError(
            f"{folder} has its weights in {', '.join(other)}, which only unpickling can read, and is not read; convert "
            "it to safetensors first (load it with transformers, then save_pretrained), or take a revision that has it"
        )
    raise CheckpointNotFoundError(
        f"{folder} holds no weights: neither model.safetensors nor model{_INDEX_SUFFIX} is there"
    )


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        content = index_path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{index_path} does not exist") from error
    weight_map = load_json_object(content, str(index_path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index_path} has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        # A shard is a file beside its index: nothing else on the disk may be reached through one.
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise FormatError(f"{index_path}: tensor {name!r} is said to be in {shard!r}, which is no plain file name")
    return weight_map


def _stamp(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ino
