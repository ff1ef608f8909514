"""What an interrupted run has done already: a line for each unit, with checksums of what it wrote.

Nothing in it is believed that the files do not confirm, so nothing has to be brought to the disk in between.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from typing_extensions import Self

from t2n_hf.hf.stored import StoredForm
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.memory import bytes_of

__all__ = ["Entry", "Journal", "fingerprint"]

_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One unit that was written: CRC-32 by tensor key, and what its weights became (see `values.Made`)."""

    unit: str
    checksums: Mapping[str, int]
    forms: Mapping[str, StoredForm]
    errors: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Give the entry as JSON holds it."""
        forms = {name: form.to_json() for name, form in self.forms.items()}
        return {"unit": self.unit, "checksums": dict(self.checksums), "forms": forms, "errors": dict(self.errors)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Entry":
        """Read what `to_json` gave. Raises KeyError, TypeError or ValueError for something else."""
        forms = {
            name: StoredForm(form["tag"], tuple(form["parts"]), form["meta"]) for name, form in value["forms"].items()
        }
        checksums = {key: int(checksum) for key, checksum in value["checksums"].items()}
        errors = {name: float(error) for name, error in value["errors"].items()}
        return cls(unit=str(value["unit"]), checksums=checksums, forms=forms, errors=errors)


class Journal:
    """The journal of one output, for one `fingerprint` of all that it is made from.

    `done` are the entries of an older run; empty when there was none, or one of another fingerprint. A context manager.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._head = {"schema_version": _SCHEMA_VERSION, "fingerprint": fingerprint}
        lines = list(_lines(path))
        self.is_resumed = bool(lines) and lines[0] == self._head
        self.done: dict[str, Entry] = {}
        for line in lines[1:] if self.is_resumed else ():
            try:
                entry = Entry.from_json(line)
            except (AttributeError, KeyError, TypeError, ValueError):
                break
            self.done[entry.unit] = entry
        self._fd = -1

    def open(self) -> None:
        """Begin to write: the head, and the entries that are kept. A line that was cut off in the middle goes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        self._fd = os.open(self.path, flags, 0o666)
        content = [self._head, *(entry.to_json() for entry in self.done.values())]
        self._write("".join(json.dumps(line) + "\n" for line in content))

    def add(self, entry: Entry) -> None:
        """Note that a unit is written."""
        self.done[entry.unit] = entry
        self._write(json.dumps(entry.to_json()) + "\n")

    def _write(self, text: str) -> None:
        view = memoryview(text.encode())
        while view:
            view = view[os.write(self._fd, view) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lines(path: Path) -> Iterator[Any]:
    """Give the lines of a journal, up to one that is not whole."""
    if path.is_symlink() or not path.is_file():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        yield value


def fingerprint(stored: CheckpointIndex, importance: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> str:
    """Condense all that the output depends on: the files that are read (name, size, time), importance, and `facts`."""
    files = []
    for file in stored.files:
        status = file.path.stat()
        files.append([file.path.name, status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256(json.dumps([sorted(files), facts], sort_keys=True, default=str).encode())
    for name in sorted(importance):
        digest.update(f"{name} {tuple(importance[name].shape)}".encode())
        digest.update(bytes_of(importance[name].contiguous()))
    return digest.hexdigest()
