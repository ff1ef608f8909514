"""Values of a dense weight in the type of the archive: some at a time, checked."""

from typing import Final, final

import torch

from t2n_hf.errors import QuantizationError

__all__ = ["Cast"]

_CHUNK_NBYTES: Final = 1 << 20


@final
class Cast:
    """Casts up to `count` values at a time, into memory that the next call overwrites.

    With a `name`, that of the weight, NaN and what `wanted` cannot hold are refused.
    """

    def __init__(self, held: torch.dtype, wanted: torch.dtype, name: str | None) -> None:
        self.count = _CHUNK_NBYTES // max(held.itemsize, wanted.itemsize)
        self._name = name
        # torch casts bf16 to f16 value by value, but either to or from f32 with the vectors of the processor.
        steps = (torch.float32, wanted) if (held, wanted) == (torch.bfloat16, torch.float16) else (wanted,)
        self._buffers = [] if held == wanted else [torch.empty(0, dtype=dtype) for dtype in steps]

    def __call__(self, values: torch.Tensor) -> memoryview:
        """Give the bytes of `values`, 1-D and contiguous, in the type that is wanted. Raises QuantizationError."""
        found = values
        for place in range(len(self._buffers)):
            found = self._buffer(place, values.numel()).copy_(found)
        if self._name is not None:
            _refuse_bad_values(self._name, found)
        return memoryview(found.numpy()).cast("B")  # type: ignore[arg-type]

    def _buffer(self, place: int, count: int) -> torch.Tensor:
        if self._buffers[place].numel() < count:
            self._buffers[place] = self._buffers[place].new_empty(count)
        return self._buffers[place][:count]


def _refuse_bad_values(name: str, values: torch.Tensor) -> None:
    low, high = (float(bound) for bound in torch.aminmax(values))
    if low != low or high != high:
        raise QuantizationError(f"weight {name!r} holds NaN: the model is damaged; nothing was exported")
    if values.dtype is torch.float16 and max(-low, high) == float("inf"):
        raise QuantizationError(
            f"weight {name!r} holds a value beyond {torch.finfo(torch.float16).max:.0f}, the largest of f16; "
            "export with dtype='f32'"
        )
