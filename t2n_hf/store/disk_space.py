"""Giving parts of a file back to the disk."""

import contextlib
import ctypes
import os
import sys
from functools import cache
from typing import Any, Final

__all__ = ["cut", "punch_hole"]

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


@cache
def _fallocate() -> Any:  # noqa: ANN401 - a C function, None where the system has none
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give the blocks of a range back to the disk; the file stays as long as it is, and the range reads as zeros.

    Does nothing where the system or the filesystem cannot do that.
    """
    function = _fallocate()
    if function is not None and nbytes > 0:
        function(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def cut(fd: int, nbytes: int) -> None:
    """End the file after `nbytes`, when that can be done."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, nbytes)
