"""Further packings of u8 values: bits, and general compression. Any shape comes back as it was."""

import abc
import math
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import Self

from t2n_hf.errors import ConfigError, FormatError, QuantizationError
from t2n_hf.tensor.quant.described import Described

__all__ = ["BitPacking", "U8Compressor", "ZlibCompression"]

_LENGTH_NBYTES: Final = 8
_MAX_RANK: Final = 64


class U8Compressor(Described, abc.ABC):
    """A further packing of u8 values (bits, or any compression) that a `QTensor` keeps them in.

    One compressor may serve many tensors: what `decompress` needs to know is in the compressed bytes.
    """

    KIND: ClassVar[str] = "compressor"

    @abc.abstractmethod
    def compress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Give the compressed form of `u8_tensor`, uint8 as well, of any shape."""

    @abc.abstractmethod
    def decompress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Undo `compress`: the same values in the same shape."""


def _with_shape(shape: torch.Size, payload: torch.Tensor) -> torch.Tensor:
    """Put `shape` before the bytes of `payload`: rank, then 8 bytes for each length, little endian."""
    head = b"".join(length.to_bytes(_LENGTH_NBYTES, "little") for length in shape)
    front = torch.frombuffer(bytearray((len(shape),)) + bytearray(head), dtype=torch.uint8)
    return torch.cat((front.to(payload.device), payload))


def _split_shape(compressed: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Undo `_with_shape`. Raises FormatError when there is no shape."""
    flat = compressed.reshape(-1)
    rank = int(flat[0]) if flat.numel() else _MAX_RANK + 1
    start = 1 + rank * _LENGTH_NBYTES
    if rank > _MAX_RANK or flat.numel() < start:
        raise FormatError(f"{flat.numel()} bytes do not begin with the shape of what was compressed")
    head = bytes(flat[1:start].tolist())
    parts = (head[place : place + _LENGTH_NBYTES] for place in range(0, len(head), _LENGTH_NBYTES))
    return [int.from_bytes(part, "little") for part in parts], flat[start:]


@final
class BitPacking(U8Compressor):
    """Keeps the low `n_bits` (1, 2 or 4) of each value: 8 / n_bits values in a byte, the first in the lowest bits.

    A tensor of n values takes n * n_bits / 8 bytes, rounded up, and 1 + 8 * rank for its shape.
    """

    STATE_NAME: ClassVar[str] = "bit_packing"

    def __init__(self, n_bits: int) -> None:
        if n_bits not in {1, 2, 4}:
            raise ConfigError(f"n_bits={n_bits!r}; expected 1, 2 or 4, which fill whole bytes")
        self.n_bits = n_bits

    def _shifts(self, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 8, self.n_bits, dtype=torch.uint8, device=device)

    def compress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Pack `u8_tensor`, uint8 of any shape. Raises QuantizationError for a value that needs more bits."""
        flat = u8_tensor.reshape(-1)
        if flat.dtype is not torch.uint8 or (flat.numel() and int(flat.max()) >= 1 << self.n_bits):
            raise QuantizationError(
                f"{self.n_bits} bits hold uint8 values below {1 << self.n_bits}; got {flat.dtype} up to "
                f"{int(flat.max()) if flat.numel() else 0}"
            )
        shifts = self._shifts(flat.device)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % len(shifts)))
        packed = (padded.view(-1, len(shifts)) << shifts).sum(dim=-1, dtype=torch.uint8)
        return _with_shape(u8_tensor.shape, packed)

    def decompress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Give the values in their shape. Raises FormatError when there are not as many bytes as the shape needs."""
        shape, packed = _split_shape(u8_tensor)
        count, each = math.prod(shape), 8 // self.n_bits
        if packed.numel() != -(-count // each):
            raise FormatError(f"{packed.numel()} bytes of {self.n_bits} bits do not hold a tensor of shape {shape}")
        values = packed.unsqueeze(-1) >> self._shifts(packed.device) & (1 << self.n_bits) - 1
        return values.view(-1)[:count].reshape(shape)

    def state_meta(self) -> dict[str, Any]:
        """The number of bits."""
        return {"n_bits": self.n_bits}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Rebuild from the number of bits. Raises FormatError without one."""
        if meta.get("n_bits") not in {1, 2, 4}:
            raise FormatError(f"bit packing is stored with n_bits 1, 2 or 4; got {dict(meta)!r:.200}")
        return cls(meta["n_bits"])


@final
class ZlibCompression(U8Compressor):
    """Keeps values deflated. Every use inflates all of them, on the CPU: for weights that are seldom read."""

    STATE_NAME: ClassVar[str] = "zlib"

    def __init__(self, level: int = 6) -> None:
        if not 0 <= level <= 9:
            raise ConfigError(f"level={level!r}; expected 0 to 9")
        self.level = level

    def compress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Deflate `u8_tensor`, uint8 of any shape."""
        packed = zlib.compress(u8_tensor.cpu().contiguous().numpy().tobytes(), self.level)
        return _with_shape(u8_tensor.shape, torch.frombuffer(bytearray(packed), dtype=torch.uint8)).to(u8_tensor.device)

    def decompress(self, u8_tensor: torch.Tensor) -> torch.Tensor:
        """Inflate. Raises FormatError for damaged bytes, or any that give more or less than their shape says."""
        shape, packed = _split_shape(u8_tensor)
        expected = math.prod(shape)
        inflater = zlib.decompressobj()
        try:
            values = inflater.decompress(packed.cpu().contiguous().numpy().tobytes(), expected + 1)
        except zlib.error as error:
            raise FormatError(f"the bytes of a tensor of shape {shape} cannot be inflated: {error}") from error
        if len(values) != expected or not inflater.eof:
            raise FormatError(f"the bytes of a tensor of shape {shape} inflate to another size")
        flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if expected else u8_tensor.new_empty(0).cpu()
        return flat.view(shape).to(u8_tensor.device)

    def state_meta(self) -> dict[str, Any]:
        """The level."""
        return {"level": self.level}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Rebuild from the level. Raises FormatError without one."""
        if meta.get("level") not in range(10):
            raise FormatError(f"zlib is stored with a level of 0 to 9; got {dict(meta)!r:.200}")
        return cls(meta["level"])
