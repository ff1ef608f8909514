"""The `.dat` file of one tensor: a 128-byte header and the values, as tract reads them."""

import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from t2n_hf.atomic import staged_file
from t2n_hf.dtypes import DTYPES, dtype_named
from t2n_hf.errors import FormatError

__all__ = [
    "BLOCK_FORMATS",
    "HEADER_NBYTES",
    "MAX_PAYLOAD_NBYTES",
    "MAX_RANK",
    "BlockFormat",
    "Buffer",
    "DatHeader",
    "Payload",
    "array_payload",
    "decode_blocks",
    "dense_payload",
    "q4_0_payload",
    "q8_1_payload",
    "read_dat",
    "read_header",
    "write_dat",
]

HEADER_NBYTES: Final = 128
MAX_RANK: Final = 8
MAX_PAYLOAD_NBYTES: Final = (1 << 32) - 1
_MAX_DIM: Final = (1 << 32) - 1
_MAGIC: Final = b"\x4e\xef"
_VERSION: Final = (1, 0)
_BLOCK_BITS: Final = 0xFFFFFFFF
_TRACT_VENDOR: Final = 0x5452
_BLOCK_LENGTH: Final = 32
_ARRAY_CHUNK_NBYTES: Final = 8 << 20
# 4 is what some writers put for signed integers; tract reads it too.
_ITEM_TYPE_ALIASES: Final = {4: 3}

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BlockFormat:
    """A format that packs 32 neighbours of the row-major order into one block of `block_nbytes` bytes.

    "q4_0": f16 scale, then 16 bytes, byte i = q[i] | q[i+16] << 4; value (q - 8) * scale.
    "q8_1": f16 scale, f16 sum, then 32 signed bytes; value q * scale. tract can only gather from it.
    """

    name: str
    item_type: int
    block_nbytes: int


BLOCK_FORMATS: Final[Mapping[str, BlockFormat]] = {
    block.name: block for block in (BlockFormat("q4_0", 0x3040, 18), BlockFormat("q8_1", 0x3080, 36))
}
_BLOCKS_BY_ITEM_TYPE: Final = {block.item_type: block for block in BLOCK_FORMATS.values()}
_DENSE_BY_ITEM: Final = {(d.item_type, d.bits): d.name for d in DTYPES.values() if d.item_type is not None}


@dataclass(frozen=True, kw_only=True)
class DatHeader:
    """What stands before the values.

    Little endian: bytes 0-1 magic 4E EF | 2-3 version 1 0 | 4-7 payload bytes, u32 | 8-11 rank | 12-43 dims, 8 x u32 |
    44-47 bits per item | 48-49 item type | 50-51 vendor | 52-127 zero. A block format: vendor 5452, bits FFFFFFFF.
    """

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<2s2BII8IIHH76x")

    shape: tuple[int, ...]
    bits: int
    item_type: int
    vendor: int = 0
    nbytes: int

    @property
    def format(self) -> str:
        """Name of the number type ("f32", "i64", ...) or of the block format ("q4_0", "q8_1").

        Raises FormatError when it is neither.
        """
        if self.vendor == _TRACT_VENDOR and self.bits == _BLOCK_BITS and self.item_type in _BLOCKS_BY_ITEM_TYPE:
            return _BLOCKS_BY_ITEM_TYPE[self.item_type].name
        item = (_ITEM_TYPE_ALIASES.get(self.item_type, self.item_type), self.bits)
        if self.vendor == 0 and item in _DENSE_BY_ITEM:
            return _DENSE_BY_ITEM[item]
        raise FormatError(
            f"unknown item of a .dat file: type {self.item_type:#x}, {self.bits} bits, vendor {self.vendor:#x}; "
            f"known are {', '.join(sorted([*_DENSE_BY_ITEM.values(), *BLOCK_FORMATS]))}"
        )

    def check(self, name: str) -> None:
        """Raise FormatError, naming the tensor `name`, when a `.dat` file cannot hold this."""
        if len(self.shape) > MAX_RANK:
            raise FormatError(
                f"tensor {name!r} has rank {len(self.shape)}; a .dat file holds at most {MAX_RANK} dimensions"
            )
        if any(not 0 <= dim <= _MAX_DIM for dim in self.shape):
            raise FormatError(f"tensor {name!r} has shape {list(self.shape)}; each dimension must be 0 to {_MAX_DIM}")
        try:
            format_name = self.format
        except FormatError as error:
            raise FormatError(f"tensor {name!r}: {error}") from None
        expected = _payload_nbytes(self.shape, format_name, name)
        if self.nbytes != expected:
            raise FormatError(
                f"tensor {name!r} of shape {list(self.shape)} and format {format_name} takes {expected} bytes, "
                f"got {self.nbytes}"
            )
        if self.nbytes > MAX_PAYLOAD_NBYTES:
            raise FormatError(
                f"tensor {name!r} takes {self.nbytes} bytes, and a .dat file holds less than 4 GiB; "
                "export it in f16 or in a block format such as q4_0, or split it in the model"
            )

    def pack(self, name: str = "?") -> bytes:
        """Return the 128 bytes. Raises FormatError, naming the tensor `name`, when they cannot say it."""
        self.check(name)
        dims = (*self.shape, *[0] * (MAX_RANK - len(self.shape)))
        return self.LAYOUT.pack(
            _MAGIC, *_VERSION, self.nbytes, len(self.shape), *dims, self.bits, self.item_type, self.vendor
        )

    @classmethod
    def unpack(cls, data: Buffer, name: str = "?") -> "DatHeader":
        """Read 128 bytes. Raises FormatError, naming the tensor `name`, when they are no valid header."""
        if len(data) != HEADER_NBYTES:
            raise FormatError(f"tensor {name!r}: a .dat header has {HEADER_NBYTES} bytes, got {len(data)}")
        magic, major, minor, nbytes, rank, *rest = cls.LAYOUT.unpack(data)
        if magic != _MAGIC:
            raise FormatError(
                f"tensor {name!r}: not a .dat file: it starts with {magic.hex()}, expected {_MAGIC.hex()}"
            )
        if (major, minor) != _VERSION:
            raise FormatError(f"tensor {name!r}: .dat version {major}.{minor}; expected 1.0")
        if rank > MAX_RANK:
            raise FormatError(f"tensor {name!r} claims rank {rank}; a .dat file holds at most {MAX_RANK} dimensions")
        bits, item_type, vendor = rest[MAX_RANK:]
        header = cls(shape=tuple(rest[:rank]), bits=bits, item_type=item_type, vendor=vendor, nbytes=nbytes)
        header.check(name)
        return header


def _payload_nbytes(shape: tuple[int, ...], format_name: str, name: str) -> int:
    if format_name not in BLOCK_FORMATS:
        return math.prod(shape) * dtype_named(format_name).nbytes
    if len(shape) < 2:
        raise FormatError(f"tensor {name!r} has shape {list(shape)}; {format_name} needs rank 2 or more")
    row = math.prod(shape[1:])
    if row % _BLOCK_LENGTH:
        raise FormatError(
            f"tensor {name!r} has shape {list(shape)}; {format_name} needs rows of a multiple of {_BLOCK_LENGTH} "
            f"values, got {row}"
        )
    return shape[0] * (row // _BLOCK_LENGTH) * BLOCK_FORMATS[format_name].block_nbytes


@dataclass(frozen=True)
class Payload:
    """A tensor on its way into a `.dat` file: its header, and a function that streams its values.

    `chunks()` is called once per write and gives `header.nbytes` bytes in all. A chunk is used up before the next one
    is asked for, so a producer may reuse its memory.
    """

    header: DatHeader
    chunks: Callable[[], Iterable[Buffer]]

    @property
    def nbytes(self) -> int:
        """Size of the file: header and values."""
        return HEADER_NBYTES + self.header.nbytes

    def stream(self, name: str) -> Iterator[Buffer]:
        """Give the bytes of the file: the header, then the values.

        Raises FormatError, naming the tensor `name`, when it has no valid header, or chunks add up to another size.
        """
        yield self.header.pack(name)
        done = 0
        for chunk in self.chunks():
            done += memoryview(chunk).nbytes
            if done > self.header.nbytes:
                break
            yield chunk
        if done != self.header.nbytes:
            raise FormatError(f"tensor {name!r} gave {done} bytes or more; its header says {self.header.nbytes}")


def dense_payload(shape: Iterable[int], dtype_name: str, chunks: Callable[[], Iterable[Buffer]]) -> Payload:
    """Describe plain row-major values of a type that NNEF has ("f32", "f16", "i64", ...).

    Raises FormatError for a type that it has not (bf16).
    """
    dtype = dtype_named(dtype_name)
    if dtype.item_type is None:
        raise FormatError(f"NNEF has no {dtype.name}; cast to f32 or f16 first")
    shape = tuple(int(dim) for dim in shape)
    nbytes = math.prod(shape) * dtype.nbytes
    return Payload(DatHeader(shape=shape, bits=dtype.bits, item_type=dtype.item_type, nbytes=nbytes), chunks)


def _block_payload(shape: Iterable[int], format_name: str, chunks: Callable[[], Iterable[Buffer]]) -> Payload:
    block = BLOCK_FORMATS[format_name]
    shape = tuple(int(dim) for dim in shape)
    nbytes = _payload_nbytes(shape, format_name, "?")
    header = DatHeader(shape=shape, bits=_BLOCK_BITS, item_type=block.item_type, vendor=_TRACT_VENDOR, nbytes=nbytes)
    return Payload(header, chunks)


def q4_0_payload(shape: Iterable[int], chunks: Callable[[], Iterable[Buffer]]) -> Payload:
    """Describe Q4_0 blocks (see `BlockFormat`) of a tensor of logical `shape`: rank >= 2, prod(shape[1:]) % 32 == 0.

    Raises FormatError for another shape.
    """
    return _block_payload(shape, "q4_0", chunks)


def q8_1_payload(shape: Iterable[int], chunks: Callable[[], Iterable[Buffer]]) -> Payload:
    """Describe Q8_1 blocks (see `BlockFormat`) of a tensor of logical `shape`: rank >= 2, prod(shape[1:]) % 32 == 0.

    Raises FormatError for another shape.
    """
    return _block_payload(shape, "q8_1", chunks)


def array_payload(array: np.ndarray) -> Payload:
    """Describe the values of a numpy array; they are streamed in chunks of 8 MiB at most."""

    def chunks() -> Iterator[Buffer]:
        flat = array.reshape(-1)
        step = _ARRAY_CHUNK_NBYTES // max(1, array.itemsize)
        for start in range(0, flat.size, step):
            part = np.ascontiguousarray(flat[start : start + step], dtype=flat.dtype.newbyteorder("<"))
            yield memoryview(part).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol before 3.12

    return dense_payload(array.shape, array.dtype.newbyteorder("=").name, chunks)


def write_dat(path: str | Path, payload: Payload) -> None:
    """Write one `.dat` file; it appears when it is complete. Not synced to disk: the folder around it is.

    Raises FormatError before anything is written when the header cannot say the tensor, StorageError on a full disk.
    """
    path = Path(path)
    payload.header.check(path.stem)
    with staged_file(path, sync=False) as partial, open(partial, "wb", buffering=0) as file:
        for chunk in payload.stream(path.stem):
            _write_all(file, chunk)


def _write_all(file: Any, chunk: Buffer) -> None:  # noqa: ANN401 - a raw file
    view = memoryview(chunk).cast("B")
    while view:
        view = view[file.write(view) :]


def read_header(source: str | Path | Buffer) -> DatHeader:
    """Read the header of a `.dat` file, given by path or by its first bytes. Raises FormatError."""
    if isinstance(source, (str, Path)):
        with open(source, "rb") as file:
            return DatHeader.unpack(file.read(HEADER_NBYTES), Path(source).stem)
    return DatHeader.unpack(memoryview(source)[:HEADER_NBYTES])


def read_dat(path: str | Path) -> np.ndarray:
    """Read the values of a `.dat` file: dense types as they are, block formats decoded to float32.

    Raises FormatError when the file is not as long as its header says.
    """
    path = Path(path)
    header = read_header(path)
    size = os.path.getsize(path)
    if size != HEADER_NBYTES + header.nbytes:
        raise FormatError(f"{path} has {size} bytes; its header says {HEADER_NBYTES + header.nbytes}")
    if header.format in BLOCK_FORMATS:
        packed = np.fromfile(path, dtype=np.uint8, offset=HEADER_NBYTES)
        return decode_blocks(packed, header.format).reshape(header.shape)
    little = np.dtype(dtype_named(header.format).numpy).newbyteorder("<")
    return np.fromfile(path, dtype=little, offset=HEADER_NBYTES).reshape(header.shape)


def decode_blocks(packed: np.ndarray, format_name: str) -> np.ndarray:
    """Decode the blocks in `packed` (uint8, any shape, whole blocks) to float32 values, flat, in row-major order."""
    blocks = packed.reshape(-1, BLOCK_FORMATS[format_name].block_nbytes)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    if format_name == "q8_1":
        return (np.ascontiguousarray(blocks[:, 4:]).view(np.int8) * scale).reshape(-1)
    nibbles = np.concatenate([blocks[:, 2:] & 0xF, blocks[:, 2:] >> 4], axis=1).astype(np.int8) - 8
    return (nibbles * scale).reshape(-1)
