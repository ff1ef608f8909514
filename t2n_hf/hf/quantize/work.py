"""The folder in which a quantized checkpoint grows: unit by unit, to be gone on with after any interruption.

While it grows, files with weights have names that nothing loads, and there is no config.json; names become final, and
the journal goes, when all is written.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from t2n_hf.errors import StorageError
from t2n_hf.hf.quantize.journal import Entry, Journal
from t2n_hf.hf.quantize.plan import OutputPlan
from t2n_hf.hf.quantize.units import Unit
from t2n_hf.hf.quantize.values import Made
from t2n_hf.store.shard import ShardFile

__all__ = ["GrowingFolder", "disk_needed", "empty", "format_nbytes"]

_JOURNAL: Final = "journal.jsonl"
_GROWING: Final = ".unfinished"
_SIDE: Final = "side"
_CONFIG: Final = "config.json"
_SPARE_NBYTES: Final = 1 << 20  # the journal, config.json, the note
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class GrowingFolder:
    """`folder` is the temporary sibling of the output; `identity` the fingerprint of all that it is made from.

    A context manager: files are open inside. `entries` are the units that are written.
    """

    def __init__(self, folder: Path, plan: OutputPlan, identity: str, *, resume: bool) -> None:
        self.folder = folder
        self.plan = plan
        self._journal = Journal(folder / _JOURNAL, identity)
        self.found_other_work = not self._journal.is_resumed and self._journal.path.exists()
        if not (resume and self._journal.is_resumed):
            empty(folder)
            self._journal = Journal(folder / _JOURNAL, identity)
        self._shards: dict[str, ShardFile] = {}
        self._stack = contextlib.ExitStack()

    @property
    def entries(self) -> dict[str, Entry]:
        """What is written, by unit."""
        return self._journal.done

    def __enter__(self) -> "GrowingFolder":
        with self._stack as stack:
            self._tidy()
            self._check_space()
            stack.enter_context(self._journal)
            for name, layout in self.plan.files.items():
                self._shards[name] = stack.enter_context(ShardFile(self.folder / f"{name}{_GROWING}", layout))
            self._forget_what_is_not_there()
            self._journal.open()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _tidy(self) -> None:
        """Undo what an older run did at its very end, when it was stopped there."""
        growing = {f"{name}{_GROWING}" for name in self.plan.files}
        for name in self.plan.files:
            if (self.folder / name).exists() and not (self.folder / name).is_symlink():
                os.replace(self.folder / name, self.folder / f"{name}{_GROWING}")
        empty(self.folder, but=growing | {_JOURNAL})

    def _check_space(self) -> None:
        """Raise StorageError when the disk cannot hold what is still to be written."""
        needed, free = disk_needed(self.plan, self.folder), shutil.disk_usage(self.folder).free
        if needed > free:
            raise StorageError(
                errno.ENOSPC,
                f"{self.folder.parent} has {format_nbytes(free)} free, and {format_nbytes(needed)} are needed; free "
                "some space, or choose another disk",
            )

    def _forget_what_is_not_there(self) -> None:
        """Believe only what the files confirm: a unit whose bytes are not those that were written is made again."""
        keys = {unit.name: unit.keys for unit in self.plan.units}
        for name, entry in list(self.entries.items()):
            whole = set(entry.checksums) == set(keys.get(name, ()))
            if not whole or any(self._shard(key).read_checksum(key) != crc for key, crc in entry.checksums.items()):
                del self.entries[name]

    def _shard(self, key: str) -> ShardFile:
        return self._shards[self.plan.file_of[key]]

    def append(self, key: str, chunk: memoryview) -> None:
        """Write the next bytes of tensor `key`. Raises StorageError on a full disk, saying what is missing."""
        try:
            self._shard(key).append(key, chunk)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            needed, free = disk_needed(self.plan, self.folder), shutil.disk_usage(self.folder).free
            raise StorageError(
                error.errno,
                f"the disk of {self.folder.parent} is full: {format_nbytes(needed)} are still needed, "
                f"{format_nbytes(free)} are free. What is done is kept: free some space and run the same again",
            ) from error

    def begin(self, unit: Unit) -> None:
        """Start a unit, from its first byte."""
        for key in unit.keys:
            self._shard(key).restart([key])

    def end(self, unit: Unit, made: Made) -> None:
        """Note that a unit is written whole. Raises FormatError when it is not."""
        checksums = {key: self._shard(key).checksum(key) for key in unit.keys}
        errors = {name: error.relative for name, error in made.errors.items() if error.relative is not None}
        self._journal.add(Entry(unit=unit.name, checksums=checksums, forms=made.forms, errors=errors))

    def finish(self, write_side_files: Callable[[Path], None]) -> None:
        """Give everything its final name; `write_side_files` fills a folder with config.json and what else there is."""
        side = self.folder / _SIDE
        side.mkdir()
        write_side_files(side)
        for shard in self._shards.values():
            shard.sync()
            shard.close()
        for path in sorted(side.iterdir(), key=lambda path: path.name == _CONFIG):
            if path.name != _CONFIG:
                os.replace(path, self.folder / path.name)
        for name in self.plan.files:
            os.replace(self.folder / f"{name}{_GROWING}", self.folder / name)
        os.replace(side / _CONFIG, self.folder / _CONFIG)
        side.rmdir()
        (self.folder / _JOURNAL).unlink()


def disk_needed(plan: OutputPlan, folder: Path) -> int:
    """Bytes that the disk of `folder` has to have free: without what an interrupted run has written there."""
    there = 0
    for name in plan.files:
        with contextlib.suppress(OSError):
            there += os.stat(folder / f"{name}{_GROWING}").st_blocks * 512
    return max(0, plan.nbytes - there) + _SPARE_NBYTES


def empty(folder: Path, but: frozenset[str] | set[str] = frozenset()) -> None:
    """Remove everything in `folder` but the names in `but`."""
    for entry in _entries(folder):
        if entry.name in but:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _entries(folder: Path) -> Iterator[Path]:
    yield from list(folder.iterdir())


def format_nbytes(nbytes: int) -> str:
    """Write a number of bytes the way people read it, exact beside it: "1.5 GB (1,500,000,000 bytes)"."""
    value, unit = float(nbytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{value:.1f} {unit} ({nbytes:,} bytes)"
