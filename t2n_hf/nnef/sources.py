"""Where the members of an archive come from: a folder, or a .tar or .tgz file that may be hostile."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.deflate import GzipReader
from t2n_hf.nnef.names import member_problem
from t2n_hf.nnef.tar import Forward, TarMember, tar_members

__all__ = ["FolderSource", "Source", "TarSource"]

_MAX_MEMBERS: Final = 100_000
_SLACK_NBYTES: Final = 128 << 20  # headers and padding of that many members


class Source(Protocol):
    """Gives the members of one archive, from its start each time."""

    def members(self) -> Iterator[tuple[TarMember, Forward]]:
        """Give each member and a stream at its first byte; the consumer passes over all of it."""
        ...


class _FileReader:
    """A file as a `Forward` stream, bounded by its own size."""

    def __init__(self, file: BinaryIO, nbytes: int, what: str) -> None:
        self._file = file
        self._nbytes = nbytes
        self._what = what

    def read(self, nbytes: int) -> bytes:
        return self._file.read(min(nbytes, self._nbytes))

    def skip(self, nbytes: int) -> None:
        if self._file.seek(nbytes, 1) > self._nbytes:
            raise ArchiveError(f"{self._what} is truncated: a member ends after the end of the file")


@dataclass(frozen=True)
class FolderSource:
    """A folder, its files in the order of their names."""

    path: Path

    def members(self) -> Iterator[tuple[TarMember, Forward]]:
        """See `Source`."""
        for path in sorted(self.path.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            name = path.relative_to(self.path).as_posix()
            # A link to a plain file is fine in a folder: the Hub's cache is made of them.
            problem = member_problem(name) if path.is_file() else "it is no plain file"
            if problem is not None:
                raise ArchiveError(f"{self.path}: {name!r} is refused: {problem}")
            nbytes = path.stat().st_size
            with open(path, "rb") as file:
                yield TarMember(name, nbytes), _FileReader(file, nbytes, str(path))


@dataclass(frozen=True)
class TarSource:
    """A .tar or .tgz, told apart by its first bytes; its members hold at most `max_nbytes` together."""

    path: Path
    max_nbytes: int

    def members(self) -> Iterator[tuple[TarMember, Forward]]:
        """See `Source`."""
        what = str(self.path)
        with open(self.path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = self._inflated(file, what) if packed else _FileReader(file, self.path.stat().st_size, what)
            total = 0
            for count, member in enumerate(tar_members(stream, what), 1):
                total += member.nbytes
                if count > _MAX_MEMBERS:
                    raise ArchiveError(f"{what} has more than {_MAX_MEMBERS} members; no archive of a model has")
                if total > self.max_nbytes:
                    raise ArchiveError(
                        f"{what}: its members claim {total} bytes or more, the limit is {self.max_nbytes}; "
                        "pass max_nbytes if you trust it"
                    )
                yield member, stream
            if isinstance(stream, GzipReader):
                stream.finish()

    def _inflated(self, file: BinaryIO, what: str) -> GzipReader:
        return GzipReader(file, what, self.max_nbytes + _SLACK_NBYTES)
