"""The header of a safetensors file, read as hostile input: every count, name and offset is checked before use.

A file is 8 bytes (little endian u64: length of the JSON) | JSON, name -> dtype, shape, data_offsets | the bytes of
the tensors, without overlap or hole.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from t2n_hf.errors import FormatError, StorageError

__all__ = ["Entry", "load_json_object", "parse_header"]

_MAX_HEADER_NBYTES: Final = 100_000_000  # the limit of safetensors itself
# A zip file, or a pickle of protocol 2 to 5.
_PICKLES: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype as safetensors says it, and where its bytes are, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> tuple[dict[str, str], dict[str, Entry]]:
    """Return the metadata and the tensors of a file of `size` bytes; `read(nbytes, offset)` gives its bytes.

    Raises StorageError when the file ends early, FormatError when the header is not what safetensors allows.
    """
    prefix = read(8, 0)
    length = int.from_bytes(prefix, "little")
    if prefix.startswith(_PICKLES) and not 8 + length <= size:
        raise FormatError(
            f"{path} looks like a pickle (torch.save), which could run any code and is never loaded; "
            "expected a safetensors file"
        )
    if length > _MAX_HEADER_NBYTES:
        raise FormatError(
            f"{path} is no safetensors file: its header claims {length} bytes, the limit is {_MAX_HEADER_NBYTES}"
        )
    if len(prefix) < 8 or 8 + length > size:
        raise StorageError(f"{path} is truncated: {size} bytes do not hold its header; fetch the file again")
    header = load_json_object(read(length, 8), f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must map texts to texts")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_cover(path, entries, 8 + length, size)
    return metadata, entries


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:  # noqa: ANN401 - JSON
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: tensor {name!r} lacks dtype, shape or data_offsets: {value!r:.200}") from error
    if not (isinstance(shape, list) and all(_is_count(number) for number in (*shape, begin, end))):
        raise FormatError(f"{path}: tensor {name!r} has a shape or offsets that are no counts: {value!r:.200}")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise FormatError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}; known: {', '.join(sorted(_BITS))}")
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise FormatError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} takes {bits / 8:g} bytes, "
            f"its offsets {begin} to {end} give {end - begin}"
        )
    return Entry(dtype, tuple(shape), base + begin, base + end)


def _check_cover(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    position, before = base, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            raise FormatError(f"{path}: tensor {name!r} overlaps {before}, at byte {entry.begin}")
        if entry.begin > position:
            raise FormatError(f"{path}: bytes {position} to {entry.begin}, before tensor {name!r}, belong to no tensor")
        if entry.end > size:
            raise StorageError(
                f"{path} is truncated: tensor {name!r} ends at byte {entry.end}, the file at byte {size}; "
                "fetch the file again"
            )
        position, before = entry.end, f"tensor {name!r}"
    if position != size:
        raise FormatError(f"{path}: {size - position} bytes after the last tensor belong to no tensor")


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r} is there twice")
        found[name] = value
    return found


def load_json_object(content: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object whose keys differ. Raises FormatError, naming `what`, for anything else."""
    try:
        value = json.loads(content, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what} is JSON, but not an object")
    return value
