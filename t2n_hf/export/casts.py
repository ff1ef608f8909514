"""Values of a dense weight in the type of the archive: some at a time, checked, by compiled code where that pays.

The code gives the numbers of torch's casts, and the check is part of it. Compiling takes as long as it saves on a few
billion values, so it is begun when a process has cast half a billion.
"""

import ctypes
from pathlib import Path
from typing import Any, Final, final

import torch

from t2n_hf.errors import QuantizationError
from t2n_hf.tensor.quant.native import MOST_THREADS, Compiled, native_library

__all__ = ["Cast", "NativeCasts", "native_casts"]

SOURCE: Final = Path(__file__).with_name("casts.c")
_CHUNK_NBYTES: Final = 1 << 20
_PATIENCE_VALUES: Final = 1 << 29
_NATIVE: Final = {
    (torch.bfloat16, torch.float16): "bf16_to_f16",
    (torch.float32, torch.float16): "f32_to_f16",
    (torch.bfloat16, torch.float32): "bf16_to_f32",
}


@final
class NativeCasts:
    """The compiled functions. The library lives as long as this."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[torch.dtype, torch.dtype], Any] = {}
        for types, name in _NATIVE.items():
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
            function.restype = ctypes.c_int
            self._functions[types] = function

    def cast(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        """Cast `values` into `out`, both plain, contiguous and on the CPU, of types in which there is a function.

        False, and `out` holds anything, when there is NaN, or what the type of `out` cannot hold.
        """
        function = self._functions[values.dtype, out.dtype]
        return not function(values.data_ptr(), values.numel(), out.data_ptr())


def native_casts(folder: Path | None = None, *, may_compile: bool = True) -> tuple[NativeCasts | None, str]:
    """Give the compiled code, and where it is, or None, and why there is none or why it is not used.

    See `native.native_library` for `folder`, and for what is compiled when.
    """
    library, report = native_library(SOURCE, folder, may_compile=may_compile)
    if library is None:
        return None, report
    try:
        casts = NativeCasts(library)
    except AttributeError as error:
        return None, f"AttributeError: {error}"
    # From subnormal numbers of f16 to large ones, and what is between two of them.
    probe = torch.linspace(-7, 7, 1001, device="cpu") * torch.logspace(-9, 3, 1001, device="cpu")
    probe[500:] = 1 + torch.arange(501, device="cpu") / 2**11
    for held, wanted in _NATIVE:
        values, found = probe.to(held), torch.empty(1001, dtype=wanted, device="cpu")
        if not casts.cast(values, found) or not torch.equal(found, values.to(wanted)):
            return None, f"the compiled code casts {held} to {wanted} otherwise than torch"
        for bad in (float("nan"), -1e6):
            values[1000] = bad
            if casts.cast(values, found) and (bad != bad or wanted is torch.float16):
                return None, f"the compiled code takes {bad} from {held} to {wanted}"
    return casts, report


_COMPILED: Final = Compiled(lambda may_compile: native_casts(may_compile=may_compile)[0], _PATIENCE_VALUES)


@final
class Cast:
    """Casts up to `count` values at a time, into memory that the next call overwrites.

    With a `name`, that of the weight, NaN and what `wanted` cannot hold are refused.
    """

    def __init__(self, held: torch.dtype, wanted: torch.dtype, name: str | None) -> None:
        self.count = _CHUNK_NBYTES // max(held.itemsize, wanted.itemsize)
        self._name = name
        self._has_native = name is not None and (held, wanted) in _NATIVE
        # torch casts bf16 to f16 value by value, but either to or from f32 with the vectors of the processor.
        steps = (torch.float32, wanted) if (held, wanted) == (torch.bfloat16, torch.float16) else (wanted,)
        self._buffers = [] if held == wanted else [torch.empty(0, dtype=dtype) for dtype in steps]

    def __call__(self, values: torch.Tensor) -> memoryview:
        """Give the bytes of `values`, 1-D and contiguous, in the type that is wanted. Raises QuantizationError."""
        found = self._natively(values)
        if found is None:
            found = values
            for place in range(len(self._buffers)):
                found = self._buffer(place, values.numel()).copy_(found)
            if self._name is not None:
                _refuse_bad_values(self._name, found)
        return memoryview(found.numpy()).cast("B")  # type: ignore[arg-type]

    def _natively(self, values: torch.Tensor) -> torch.Tensor | None:
        plain = type(values) is torch.Tensor and not values.is_neg()
        if not (self._has_native and plain) or torch.get_num_threads() > MOST_THREADS:
            return None
        native = _COMPILED.after(values.numel())
        if native is None:
            return None
        out = self._buffer(-1, values.numel())
        return out if native.cast(values, out) else None

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
