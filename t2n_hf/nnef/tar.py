"""Tar members: headers without a trace of who made them, and a reader for archives of any origin."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.names import member_problem

__all__ = ["END", "MAX_MEMBER_NBYTES", "Forward", "TarMember", "padding", "tar_header", "tar_members"]

_BLOCK_NBYTES: Final = 512
_MAX_NAME_NBYTES: Final = 1 << 16
END: Final = bytes(2 * _BLOCK_NBYTES)
MAX_MEMBER_NBYTES: Final = (1 << 32) + 127  # the largest .dat file: 4 GiB less one byte, and a header
_PAX_REFUSED: Final = ("size", "linkpath", "GNU.sparse")


class Forward(Protocol):
    """A stream that is read once, from its start to its end."""

    def read(self, nbytes: int) -> bytes:
        """Return `nbytes` bytes, fewer only at the end."""
        ...

    def skip(self, nbytes: int) -> None:
        """Pass over `nbytes` bytes. Raises ArchiveError at the end."""
        ...


@dataclass(frozen=True)
class TarMember:
    """A regular file in a tar stream."""

    name: str
    nbytes: int


def tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of a regular file: mode 644, no time, no owner, so that it says nothing but name and size."""
    info = tarfile.TarInfo(name)
    info.size = nbytes
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def padding(nbytes: int) -> bytes:
    """Return the zeros that follow `nbytes` bytes of a member."""
    return bytes(-nbytes % _BLOCK_NBYTES)


def tar_members(stream: Forward, what: str) -> Iterator[TarMember]:
    """Give the regular files of a tar stream, each with `stream` at its first byte.

    The consumer must have passed over `nbytes` bytes when it asks for the next one. Raises ArchiveError for a link, a
    device, a name that leaves the folder, a name given twice, a member that no archive of ours can have (over 4 GiB),
    and a stream that is no tar.
    """
    seen: set[str] = set()
    long_name: str | None = None
    while True:
        info = _next_header(stream, what)
        if info is None:
            return
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
            extended = _extended_name(stream, info, what)
            if extended is not None and info.type == tarfile.XGLTYPE:
                raise ArchiveError(f"{what} has a name for all members, which readers understand differently")
            long_name = extended or long_name
            continue
        name = (long_name or info.name).removeprefix("./").rstrip("/" if info.isdir() else "")
        long_name = None
        if info.isdir():
            _check_folder(info, name, what)
            continue
        _check(info, name, seen, what)
        seen.add(name)
        yield TarMember(name, info.size)
        stream.skip(len(padding(info.size)))


def _next_header(stream: Forward, what: str) -> tarfile.TarInfo | None:
    block = stream.read(_BLOCK_NBYTES)
    if block == bytes(_BLOCK_NBYTES):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise ArchiveError(f"{what} is no tar archive, or is truncated: {error}") from error


def _extended_name(stream: Forward, info: tarfile.TarInfo, what: str) -> str | None:
    if not 0 <= info.size <= _MAX_NAME_NBYTES:
        raise ArchiveError(f"{what} has an extended header of {info.size} bytes; the limit is {_MAX_NAME_NBYTES}")
    content = stream.read(info.size)
    stream.skip(len(padding(info.size)))
    try:
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return content.rstrip(b"\0").decode("utf-8")
        return _pax_path(content, what)
    except ArchiveError:
        raise
    except ValueError as error:
        raise ArchiveError(f"{what} has a damaged extended header: {error}") from error


def _pax_path(content: bytes, what: str) -> str | None:
    """Read lines `<length> <key>=<value>`; only the path matters, and nothing may change the size or make a link."""
    path = None
    while content.rstrip(b"\0"):
        length = int(content[: content.index(b" ")])
        record, content = content[:length], content[length:]
        key, _, value = record[record.index(b" ") + 1 : -1].decode("utf-8").partition("=")
        if length <= 0 or key.startswith(_PAX_REFUSED):
            raise ArchiveError(f"{what} has an extended header with {key!r}, which is not accepted")
        path = value if key == "path" else path
    return path


def _check_folder(info: tarfile.TarInfo, name: str, what: str) -> None:
    problem = member_problem(name) if name not in ("", ".") else None
    if problem is not None or info.size:
        raise ArchiveError(f"{what}: folder {name!r} is refused: {problem or 'it claims to have content'}")


def _check(info: tarfile.TarInfo, name: str, seen: set[str], what: str) -> None:
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kind = "link" if info.issym() or info.islnk() else "device or special file"
        raise ArchiveError(f"{what}: member {name!r} is a {kind} (type {info.type!r}); only plain files are accepted")
    problem = member_problem(name)
    if problem is not None:
        raise ArchiveError(f"{what}: member name {name!r} is refused: {problem}")
    if name in seen:
        raise ArchiveError(f"{what}: member {name!r} is there twice")
    if not 0 <= info.size <= MAX_MEMBER_NBYTES:
        raise ArchiveError(f"{what}: member {name!r} claims {info.size} bytes; the limit is {MAX_MEMBER_NBYTES}")
