"""Refuse to publish secrets, local paths, and the names of a user or a machine.

Everything is looked for in bytes, in what JSON says as well as in how it is spelled, in archives too, and a finding is
told by file and kind, never by value. A vocabulary holds any word there is, so in it only secrets and whole paths of
this machine count.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from t2n_hf.errors import ArchiveError, LeakError
from t2n_hf.hub.needles import LocalFacts, Needle, needles
from t2n_hf.nnef.archive import ArchiveReader

__all__ = ["refuse_leaks"]

_WINDOW_NBYTES: Final = 1 << 22
_OVERLAP_NBYTES: Final = 1 << 12
_HEAD_NBYTES: Final = 1 << 13
_MAX_JSON_NBYTES: Final = 256 << 20
_MAX_REPORTED: Final = 20
_ARCHIVE_SUFFIXES: Final = (".tgz", ".tar", ".tar.gz")
_VOCABULARY_NAMES: Final = frozenset({"vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"})
_VOCABULARY_SUFFIXES: Final = frozenset({".bpe", ".model", ".spm", ".tiktoken"})


def refuse_leaks(files: Mapping[str, Path | bytes], facts: LocalFacts) -> None:
    """Look into `files` (name to file or content), archives included. Sends nothing, changes nothing.

    The numbers inside `.dat` files are not looked into. Raises LeakError naming each file and what kind of thing it
    holds, ArchiveError when an archive cannot be read.
    """
    scan = _Scan(needles(facts))
    scan.names(files, "the name of a listed file")
    for name, content in files.items():
        if isinstance(content, bytes):
            scan.file(io.BytesIO(content), name, name)
        elif name.endswith(_ARCHIVE_SUFFIXES):
            scan.archive(content, name)
        elif not name.endswith(".dat"):
            with open(content, "rb") as file:
                scan.file(file, name, name)
    scan.finish()


class _Scan:
    """What is looked for, and the findings so far, in order, each once."""

    def __init__(self, wanted: tuple[Needle, ...]) -> None:
        self._wanted = wanted
        self._found: dict[tuple[str, str], str] = {}

    def finish(self) -> None:
        """Raise LeakError when anything was found."""
        if not self._found:
            return
        texts = [f"\n  {where}{line}: {kind}" for (where, kind), line in self._found.items()]
        more = f"\n  and {len(texts) - _MAX_REPORTED} more" if len(texts) > _MAX_REPORTED else ""
        raise LeakError(
            "nothing was sent, because the export holds what must not become public:"
            f"{''.join(texts[:_MAX_REPORTED])}{more}\nRemove it, or export again, then push"
        )

    def names(self, names: Iterable[str], where: str) -> None:
        """Look into names; `where` stands for them, because a name that leaks is not told."""
        self._bytes("\n".join(names).encode("utf-8", "surrogateescape"), where)

    def file(self, file: IO[bytes], name: str, where: str) -> None:
        """Look into one file or member called `name`; JSON is also read, so that an escaped spelling hides nothing."""
        pure = PurePosixPath(name)
        head = file.read(_HEAD_NBYTES)
        file.seek(0)
        vocabulary = pure.name in _VOCABULARY_NAMES or pure.suffix in _VOCABULARY_SUFFIXES
        any_word = vocabulary or b"\0" in head or pure.name == "tokenizer.json"
        self._stream(file, where, [needle for needle in self._wanted if needle.in_vocabulary or not any_word])
        if pure.suffix == ".json" and not vocabulary:
            file.seek(0)
            strings = _json_strings(file.read(_MAX_JSON_NBYTES), is_tokenizer=pure.name == "tokenizer.json")
            self._bytes("\n".join(strings).encode("utf-8", "surrogatepass"), where)

    def archive(self, path: Path, name: str) -> None:
        """Look into the names, the owners and the texts of an archive."""
        reader = ArchiveReader(path)
        self.names(reader.names(), f"{name}, the name of a member")
        for member in reader.names():
            if not member.endswith(".dat"):
                self.file(io.BytesIO(reader.read(member)), member, f"{name}, {member}")
        self.names(_owners(path), f"{name}, who packed it")

    def _bytes(self, data: bytes, where: str) -> None:
        for needle in self._wanted:
            if needle.pattern.search(data):
                self._found.setdefault((where, needle.kind), "")

    def _stream(self, file: IO[bytes], where: str, wanted: list[Needle]) -> None:
        tail, line = b"", 1
        while piece := file.read(_WINDOW_NBYTES):
            window = tail + piece
            for needle in wanted:
                if match := needle.pattern.search(window):
                    at = line + window.count(b"\n", 0, match.start())
                    self._found.setdefault((where, needle.kind), f", line {at}")
            tail = window[-_OVERLAP_NBYTES:]
            line += window.count(b"\n", 0, len(window) - len(tail))


def _owners(path: Path) -> set[str]:
    """What a tar says of the people and the machine that made it: none of it is in an archive of ours."""
    texts = set()
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                texts |= {member.uname, member.gname, member.linkname, *member.pax_headers.values()}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error
    return texts | {_packed_name(path)}


def _packed_name(path: Path) -> str:
    """The file name and comment that a gzip header can hold."""
    with open(path, "rb") as file:
        head = file.read(_OVERLAP_NBYTES)
    is_named = head[:2] == b"\x1f\x8b" and len(head) > 10 and head[3] & 0b11100
    return head[10:].decode("latin-1") if is_named else ""


def _json_strings(data: bytes, *, is_tokenizer: bool) -> list[str]:
    """Every key and string of a JSON text, also of repeated keys; [] for what is no JSON."""
    try:
        tree = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return []
    strings: list[str] = []
    todo: list[Any] = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, _Pairs):
            kept = [(key, item) for key, item in value if not (is_tokenizer and key in ("vocab", "merges"))]
            strings += [key for key, _ in kept]
            todo += [item for _, item in kept]
        elif isinstance(value, list):
            todo += value
    return strings


class _Pairs(tuple):
    """The (key, value) pairs of a JSON object."""
