"""Write and read NNEF archives: graph.nnef and one `.dat` per tensor, in a folder, a .tar or a .tgz.

What is written depends on the members alone: no time, no owner, no file name inside, one gzip member. What is read may
come from anywhere: names, kinds, sizes and the gzip stream are checked before anything is extracted.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeAlias

from t2n_hf.atomic import staged_file, staged_folder
from t2n_hf.errors import ArchiveError, ConfigError, FormatError
from t2n_hf.nnef.dat import HEADER_NBYTES, Buffer, DatHeader, Payload
from t2n_hf.nnef.names import member_problem
from t2n_hf.nnef.sinks import FolderSink, HashedFile, Sink, TarSink, WrittenFile, write_behind
from t2n_hf.nnef.sources import FolderSource, Source, TarSource
from t2n_hf.nnef.tar import MAX_MEMBER_NBYTES, Forward, TarMember

__all__ = ["GRAPH_FILE", "ArchiveFormat", "ArchiveReader", "ArchiveWriter"]

GRAPH_FILE: Final = "graph.nnef"
ArchiveFormat: TypeAlias = Literal["tgz", "tar", "dir"]
_FORMATS: Final = ("tgz", "tar", "dir")
_CHUNK_NBYTES: Final = 4 << 20
_MAX_GRAPH_NBYTES: Final = 256 << 20
# A .tgz may inflate to 64 MiB and 100 times its size: weights shrink less than that, bombs more.
_FREE_NBYTES: Final = 64 << 20
_MAX_RATIO: Final = 100


class ArchiveWriter:
    """Writes one archive: a context manager, and at its end `path` is complete, or as it was before.

    `format` is "tgz", "tar" or "dir"; `level` is that of gzip, 0 (stored: trained weights hardly shrink) to 9. An
    older archive at `path` is replaced (a folder only when it holds graph.nnef). Raises ConfigError
    for another format or level, StorageError on a full disk.
    """

    def __init__(self, path: str | Path, format: ArchiveFormat = "tgz", *, level: int = 0) -> None:
        if format not in _FORMATS:
            raise ConfigError(f"archive format {format!r}; expected one of {', '.join(_FORMATS)}")
        if not 0 <= level <= 9 or (level and format != "tgz"):
            raise ConfigError(f"compression level {level} for format {format!r}; expected 0, or up to 9 for tgz")
        self.path = Path(path)
        self._format = format
        self._level = level
        self._names: set[str] = set()
        self._damaged: str | None = None
        self._stack = contextlib.ExitStack()
        self._sink: Sink | None = None
        self._written: dict[str, WrittenFile] = {}

    def __enter__(self) -> "ArchiveWriter":
        with contextlib.ExitStack() as stack:
            behind = stack.enter_context(write_behind())
            if self._format == "dir":
                folder = stack.enter_context(staged_folder(self.path, overwrite=True, marker=GRAPH_FILE))
                self._sink = FolderSink(folder, self.path.name, behind)
            else:
                file = HashedFile(stack.enter_context(staged_file(self.path)), behind)
                self._sink = TarSink(file, self.path.name, self._level if self._format == "tgz" else None)
            stack.push(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None
        try:
            if kind is None and self._damaged is not None:
                raise ArchiveError(f"{self.path}: member {self._damaged!r} was not written to its end; start again")
            if kind is None:
                self._written = sink.close()
        finally:
            sink.cancel()

    @property
    def files(self) -> dict[str, WrittenFile]:
        """What was written: name relative to the folder of `path` -> (sha256 in hex, bytes). Empty before the end."""
        return dict(self._written)

    def add(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> None:
        """Add a member of `nbytes` bytes. A chunk is used up before the next one is asked for.

        Raises ArchiveError for a name that is not a relative path inside, or is there already, FormatError when chunks
        add up to another size.
        """
        if self._sink is None:
            raise ArchiveError(f"{self.path} is not open; use ArchiveWriter in a with statement")
        problem = member_problem(name)
        if problem is not None:
            raise ArchiveError(f"{self.path}: member name {name!r} is refused: {problem}")
        if name in self._names:
            raise ArchiveError(f"{self.path}: member {name!r} is there already")
        if not 0 <= nbytes <= MAX_MEMBER_NBYTES:
            raise ArchiveError(f"{self.path}: member {name!r} of {nbytes} bytes; the limit is {MAX_MEMBER_NBYTES}")
        self._names.add(name)
        self._damaged = name
        self._sink.add(name, nbytes, self._counted(name, nbytes, chunks))
        self._damaged = None

    def add_text(self, name: str, text: str) -> None:
        """Add a text file, in UTF-8. Raises as `add`."""
        content = text.encode("utf-8")
        self.add(name, len(content), [content])

    def add_dat(self, label: str, payload: Payload) -> None:
        """Add `<label>.dat`. Raises FormatError, naming the label, when a `.dat` file cannot hold it, or as `add`."""
        payload.header.check(label)
        self.add(f"{label}.dat", payload.nbytes, payload.stream(label))

    def _counted(self, name: str, nbytes: int, chunks: Iterable[Buffer]) -> Iterable[Buffer]:
        done = 0
        for chunk in chunks:
            done += memoryview(chunk).nbytes
            if done > nbytes:
                break
            yield chunk
        if done != nbytes:
            raise FormatError(f"{self.path}: member {name!r} gave {done} bytes or more, {nbytes} were announced")


@dataclass(frozen=True)
class _Indexed:
    nbytes: int
    head: bytes  # a whole graph.nnef, the header of a .dat, nothing of other members


class ArchiveReader:
    """An archive at `path`, opened when it is used; nothing stays open.

    `max_nbytes` bounds what the members of a .tar or .tgz may hold together (None: what its size makes plausible).
    Methods raise ArchiveError for hostile or damaged content.
    """

    def __init__(self, path: str | Path, *, max_nbytes: int | None = None) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            self._source: Source = FolderSource(self.path)
        elif self.path.is_file():
            limit = _FREE_NBYTES + _MAX_RATIO * self.path.stat().st_size
            self._source = TarSource(self.path, limit if max_nbytes is None else max_nbytes)
        else:
            raise ArchiveError(f"{self.path} is neither a folder nor a file; expected a folder, a .tar or a .tgz")

    @cached_property
    def _index(self) -> dict[str, _Indexed]:
        index: dict[str, _Indexed] = {}
        for member, stream in self._source.members():
            wanted = HEADER_NBYTES if member.name.endswith(".dat") else 0
            if member.name == GRAPH_FILE:
                wanted = member.nbytes
                if wanted > _MAX_GRAPH_NBYTES:
                    raise ArchiveError(
                        f"{self.path}: {GRAPH_FILE} claims {wanted} bytes; the limit is {_MAX_GRAPH_NBYTES}"
                    )
            head = _read_exactly(stream, min(wanted, member.nbytes), self._name(member.name))
            stream.skip(member.nbytes - len(head))
            index[member.name] = _Indexed(member.nbytes, head)
        for name in index:
            parent = name.rpartition("/")[0]
            while parent:
                if parent in index:
                    raise ArchiveError(f"{self.path}: {parent!r} is a file, and a folder for {name!r}")
                parent = parent.rpartition("/")[0]
        return index

    def _name(self, name: str) -> str:
        return f"{self.path}, member {name!r}"

    def names(self) -> tuple[str, ...]:
        """Member names, in their order."""
        return tuple(self._index)

    def labels(self) -> tuple[str, ...]:
        """Labels of the tensors: names of `.dat` members without the suffix, in their order."""
        return tuple(name.removesuffix(".dat") for name in self._index if name.endswith(".dat"))

    def nbytes(self, name: str) -> int:
        """Size of a member."""
        return self._entry(name).nbytes

    def header(self, label: str) -> DatHeader:
        """Return the header of `<label>.dat`. Raises FormatError when it is none, ArchiveError when sizes differ."""
        entry = self._entry(f"{label}.dat")
        header = DatHeader.unpack(entry.head, label)
        if entry.nbytes != HEADER_NBYTES + header.nbytes:
            raise ArchiveError(
                f"{self._name(label + '.dat')} has {entry.nbytes} bytes, "
                f"its header says {HEADER_NBYTES + header.nbytes}"
            )
        return header

    def text(self) -> str:
        """Return graph.nnef."""
        try:
            return self._entry(GRAPH_FILE).head.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArchiveError(f"{self._name(GRAPH_FILE)} is not UTF-8: {error}") from error

    def read(self, name: str) -> bytes:
        """Return the content of a member."""
        if name == GRAPH_FILE:
            return self._entry(name).head
        self._entry(name)
        for member, stream in self._source.members():
            if member.name == name:
                return _read_exactly(stream, member.nbytes, self._name(name))
            stream.skip(member.nbytes)
        raise ArchiveError(f"{self.path} changed while it was read: {name!r} is gone")

    def read_each(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Give (name, content) of the members in `names`, in the order of the archive, which is read once."""
        wanted = set(names)
        for member, stream in self._source.members():
            if member.name in wanted:
                yield member.name, _read_exactly(stream, member.nbytes, self._name(member.name))
            else:
                stream.skip(member.nbytes)

    def extract(self, folder: str | Path) -> None:
        """Write all members into a new folder, which appears when it is complete.

        Raises OutputExistsError when it exists, StorageError on a full disk.
        """
        expected = self._index  # everything is checked before the first byte is written
        with staged_folder(folder) as partial:
            for member, stream in self._source.members():
                if member.name not in expected or expected[member.name].nbytes != member.nbytes:
                    raise ArchiveError(f"{self.path} changed while it was read, at {member.name!r}")
                self._extract_member(member, stream, partial / member.name)

    def _extract_member(self, member: TarMember, stream: Forward, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "xb")  # noqa: SIM115 - closed below
        except FileExistsError as error:
            raise ArchiveError(
                f"{self._name(member.name)} has the name of another member on this file system"
            ) from error
        with file:
            left = member.nbytes
            while left:
                chunk = _read_exactly(stream, min(left, _CHUNK_NBYTES), self._name(member.name))
                file.write(chunk)
                left -= len(chunk)

    def _entry(self, name: str) -> _Indexed:
        if name not in self._index:
            raise ArchiveError(f"{self.path} holds no {name!r}; it holds {len(self._index)} members")
        return self._index[name]


def _read_exactly(stream: Forward, nbytes: int, what: str) -> bytes:
    content = stream.read(nbytes)
    if len(content) != nbytes:
        raise ArchiveError(f"{what} is truncated: {len(content)} of {nbytes} bytes are there")
    return content
