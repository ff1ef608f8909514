"""Final names appear only when complete: work in a temporary sibling, fsync, rename.

The sibling of `<folder>/<name>` is `<folder>/.<name>.t2n-partial`: one per target, locked while it is written. A
process that is killed leaves at most that sibling, and the next run for the same target empties it, or goes on with
what is in it (`kept_folder`). Standard library only, so that every room can use it.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from t2n_hf.errors import OutputExistsError, StorageError, T2NError

try:
    import fcntl
except ImportError:  # Windows: no lock, two writers of one target are on their own
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "PARTIAL_SUFFIX",
    "WRITE_NBYTES",
    "check_replaceable",
    "kept_folder",
    "partial_path",
    "staged_file",
    "staged_folder",
    "sync_to_disk",
]

PARTIAL_SUFFIX: Final = ".t2n-partial"
# As cp writes: for longer writes the system takes huge pages for its cache, which a virtual machine that gives free
# memory back has to ask its host for (2.2 GB in writes of 23 MB: 4.9 s, of 2 MiB: 6.6 s, of these: 0.5 to 1.2 s).
WRITE_NBYTES: Final = 128 << 10
"""The most that one call should write."""

_OLD_SUFFIX: Final = ".t2n-old"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_FULL: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_BAD_DISK: Final = (*_FULL, errno.EIO, errno.EROFS)


def partial_path(path: str | Path) -> Path:
    """Return the temporary sibling in which `path` is written."""
    path = Path(os.path.abspath(path))
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


@contextlib.contextmanager
def staged_file(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield the empty temporary sibling of `path`; rename it to `path` when the block ends well.

    When the block raises, the sibling is removed and an older `path` stays. `sync=False` skips fsync, for files
    inside a folder that is itself staged. Raises StorageError when another process writes the same target, or the
    disk is full.
    """
    target = Path(os.path.abspath(path))
    partial = partial_path(target)
    with _disk_errors(target), contextlib.ExitStack() as stack:
        fd = _locked(partial, target, os.O_RDWR | os.O_CREAT | _NO_FOLLOW)
        stack.callback(os.close, fd)
        try:
            os.ftruncate(fd, 0)
            yield partial
            if sync:
                _fsync(partial)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if sync:
            _fsync(target.parent)


@contextlib.contextmanager
def staged_folder(path: str | Path, *, overwrite: bool = False, marker: str | None = None) -> Iterator[Path]:
    """Yield an empty temporary sibling folder; it takes the name `path` when the block ends well.

    When the block raises, the sibling is removed and an older `path` stays as it was. With `overwrite` an older folder
    is replaced in one step; `marker` names a file that this older folder must hold, so that a folder of something else
    is never deleted. Raises OutputExistsError when `path` exists and may not be replaced, StorageError when another
    process writes the same target, when the disk is full, or there is no folder to make it in.
    """
    target = Path(os.path.abspath(path))
    partial = partial_path(target)
    old = target.with_name(f".{target.name}{_OLD_SUFFIX}")
    if old.is_dir() and not os.path.lexists(target):
        os.rename(old, target)  # a run was killed between the two renames of `_replace_folder`
    check_replaceable(target, overwrite, marker)
    with _disk_errors(target), contextlib.ExitStack() as stack:
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        fd = _locked(partial, target, os.O_RDONLY | _NO_FOLLOW)
        stack.callback(os.close, fd)
        try:
            _empty(partial)
            yield partial
            _fsync_tree(partial)
            check_replaceable(target, overwrite, marker)
            _replace_folder(partial, target, old)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _fsync(target.parent)


@contextlib.contextmanager
def kept_folder(path: str | Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary sibling folder that may hold an older run's work; it takes the name `path` in the end.

    When the block raises, the sibling stays as it is, unless it is empty: a later run can go on. `check` raises when
    the target may not be replaced; it is asked before the block and again after it. Raises StorageError when another
    process writes the same target, or there is no folder to make it in.
    """
    target = Path(os.path.abspath(path))
    partial = partial_path(target)
    old = target.with_name(f".{target.name}{_OLD_SUFFIX}")
    if old.is_dir() and not os.path.lexists(target):
        os.rename(old, target)  # see `staged_folder`
    check(target)
    with _disk_errors(target), contextlib.ExitStack() as stack:
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        fd = _locked(partial, target, os.O_RDONLY | _NO_FOLLOW)
        stack.callback(os.close, fd)
        try:
            yield partial
            _fsync_tree(partial)
            check(target)
            _replace_folder(partial, target, old)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.rmdir()
            raise
        _fsync(target.parent)


def check_replaceable(target: Path, overwrite: bool, marker: str | None) -> None:
    """Raise what `staged_folder` would raise about `target`, so that it can be told before any work.

    OutputExistsError when it would not be replaced, StorageError when the folder that it is to be made in is not there.
    """
    parent = Path(os.path.abspath(target)).parent
    if not parent.is_dir():
        raise StorageError(f"{parent} is no folder, so {target} cannot be made in it; make it first")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputExistsError(
            f"{target} exists already; choose another place, or overwrite it (overwrite=True, --overwrite)"
        )
    if target.is_symlink() or not target.is_dir():
        raise OutputExistsError(
            f"{target} is not a folder, and is not replaced by one; remove it, or choose another place"
        )
    if marker is not None and any(target.iterdir()) and not (target / marker).is_file():
        raise OutputExistsError(
            f"{target} holds no {marker}, so it is not an older output; it is not overwritten: choose another place"
        )


def _locked(partial: Path, target: Path, flags: int) -> int:
    """Open `partial` and lock it. The lock ends with the descriptor, or with the process however that ends."""
    while True:
        fd = os.open(partial, flags, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner of the lock may have renamed the file away between our open and our lock.
            if _is_same(fd, partial):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise StorageError(
                f"another process is writing {target} (it holds {partial}); wait for it to end"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                return fd
            os.close(fd)
            raise
        os.close(fd)


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _replace_folder(partial: Path, target: Path, old: Path) -> None:
    if not target.exists():
        os.rename(partial, target)
        return
    if _exchange(partial, target):
        shutil.rmtree(partial, ignore_errors=True)
        return
    if old.exists():
        shutil.rmtree(old)
    os.rename(target, old)
    try:
        os.rename(partial, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def sync_to_disk(fd: int) -> None:
    """Wait until the system has brought a file, or folder, to the disk. Does nothing where it cannot be told to."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_to_disk(fd)
    finally:
        os.close(fd)


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _fsync(Path(root) / name)
        _fsync(Path(root))


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except T2NError:
        raise
    except OSError as error:
        if error.errno not in _BAD_DISK:
            raise
        step = "free some space, or choose another disk" if error.errno in _FULL else "choose another disk"
        raise StorageError(
            error.errno,
            f"cannot write {target}: {error.strerror}; nothing was left at this name but what was there: {step}",
        ) from error
