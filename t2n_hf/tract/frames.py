"""The frames that a runner and its worker exchange over pipes: a JSON header, then the raw bytes of arrays.

    bytes 0-3  b"T2NF" | 4-7 length of the header, u32 little endian | the header, UTF-8 JSON | the arrays' bytes

The header's key "arrays" lists name, dtype (numpy's name) and shape of each array, in the order of the bytes, which are
row major and little endian. The other keys are the message. Nothing is executed by reading a frame.

This file is imported by the worker too, which must start fast: it may import numpy and this package's `errors` only.
"""

import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import numpy as np

from t2n_hf.errors import FormatError

__all__ = ["DTYPES", "Frame", "read_frame", "write_frame"]

Frame = tuple[dict[str, Any], dict[str, np.ndarray]]

DTYPES: Final = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_MAGIC: Final = b"T2NF"
_PREFIX: Final = struct.Struct("<4sI")
_MAX_HEADER_NBYTES: Final = 64 << 20
_MAX_RANK: Final = 32

if sys.byteorder != "little":  # both ends of the pipe are on one machine, so this is the only place that must know
    raise ImportError("t2n_hf.tract.frames needs a little-endian machine")


def write_frame(stream: BinaryIO, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Write one frame and flush. Arrays of any layout are sent row major.

    Raises FormatError for a dtype that frames do not carry.
    """
    packed = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    listing = [_describe(name, array) for name, array in packed.items()]
    header = json.dumps({**message, "arrays": listing}).encode()
    stream.write(_PREFIX.pack(_MAGIC, len(header)) + header)
    for array in packed.values():
        if array.nbytes:
            stream.write(memoryview(array.data).cast("B"))
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame | None:
    """Read one frame: (message, arrays by name). None when the stream ends before its first byte.

    Raises FormatError when it ends within a frame, or for bytes that are no frame.
    """
    first = stream.read(_PREFIX.size)
    if not first:
        return None
    if len(first) < _PREFIX.size:
        raise FormatError(f"a frame begins with {_PREFIX.size} bytes, the stream ended after {len(first)}")
    magic, length = _PREFIX.unpack(first)
    if magic != _MAGIC or length > _MAX_HEADER_NBYTES:
        raise FormatError(f"no frame: it begins with {first!r}, expected {_MAGIC!r} and a header length")
    header = bytearray(length)
    _fill(stream, memoryview(header), "the header")
    try:
        message = json.loads(header)
        listing = [(item["name"], item["dtype"], tuple(item["shape"])) for item in message.pop("arrays")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"the header of a frame cannot be read: {error}") from error
    return message, {name: _read_array(stream, name, dtype, shape) for name, dtype, shape in listing}


def _describe(name: str, array: np.ndarray) -> dict[str, Any]:
    if array.dtype.name not in DTYPES:
        raise FormatError(f"array {name!r} is of dtype {array.dtype}; a frame carries {', '.join(DTYPES)}")
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _read_array(stream: BinaryIO, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype not in DTYPES or len(shape) > _MAX_RANK or any(not isinstance(n, int) or n < 0 for n in shape):
        raise FormatError(f"array {name!r} of a frame is declared as {dtype} {shape}")
    flat = np.empty(math.prod(shape), dtype)
    if flat.nbytes:
        _fill(stream, memoryview(flat.data).cast("B"), f"array {name!r}")
    return flat.reshape(shape)


def _fill(stream: BinaryIO, view: memoryview, what: str) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"the stream ended after {done} of {len(view)} bytes of {what}")
        done += count
