"""The checksum of a gzip file by compiled code: zlib's numbers, three times as fast where the processor helps.

Compiling takes as long as zlib takes for a gigabyte, so it is begun when a process has written that much.
"""

import ctypes
import zlib
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from t2n_hf.nnef.dat import Buffer
from t2n_hf.tensor.quant.native import Compiled, native_library

__all__ = ["native_crc32", "quick_crc32"]

SOURCE: Final = Path(__file__).with_name("crc32.c")
# Of fewer bytes zlib is as fast as the call.
_LEAST_NBYTES: Final = 16 << 10
_PATIENCE_NBYTES: Final = 1 << 30
_BLOCK_NBYTES: Final = 64


@final
class NativeCrc32:
    """zlib.crc32, for large buffers. The library lives as long as this."""

    def __init__(self, library: ctypes.CDLL) -> None:
        function: Any = library.crc32_of_blocks
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
        function.restype = ctypes.c_uint32
        self._function = function

    def __call__(self, data: Buffer, value: int = 0) -> int:
        """Go on from `value` over `data`, contiguous."""
        view = memoryview(data).cast("B")
        whole = len(view) - len(view) % _BLOCK_NBYTES
        if not whole:
            return zlib.crc32(view, value)
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return zlib.crc32(view[whole:], self._function(address, whole, value))


def native_crc32(folder: Path | None = None, *, may_compile: bool = True) -> tuple[NativeCrc32 | None, str]:
    """Give the compiled code, and where it is, or None, and why there is none or why it is not used.

    See `native.native_library` for `folder`, and for what is compiled when.
    """
    library, report = native_library(SOURCE, folder, may_compile=may_compile)
    if library is None:
        return None, report
    try:
        crc32 = NativeCrc32(library)
    except AttributeError as error:
        return None, f"AttributeError: {error}"
    probe = np.random.default_rng(0).bytes(1000)
    for nbytes, value in ((64, 0), (65, 1), (191, 0xFFFFFFFF), (1000, 0x12345678)):
        if crc32(probe[:nbytes], value) != zlib.crc32(probe[:nbytes], value):
            return None, f"the compiled code gives another checksum than zlib for {nbytes} bytes"
    return crc32, report


_COMPILED: Final = Compiled(lambda may_compile: native_crc32(may_compile=may_compile)[0], _PATIENCE_NBYTES)


def quick_crc32(data: Buffer, value: int = 0) -> int:
    """Give zlib.crc32(data, value) of contiguous `data`."""
    nbytes = memoryview(data).nbytes
    native = _COMPILED.after(nbytes) if nbytes >= _LEAST_NBYTES else None
    return zlib.crc32(data, value) if native is None else native(data, value)
