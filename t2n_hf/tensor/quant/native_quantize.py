"""Q4_0 blocks by compiled code: the bytes of `q4_0_blocks.quantize_rows`, four times as fast on one thread.

Code that was compiled before is used from the start. Compiling takes about as long as torch takes for half a billion
values, so it is begun when a process has quantized so many that more are likely to come.
"""

import ctypes
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from t2n_hf.tensor.quant.native import MOST_THREADS, Compiled, native_library
from t2n_hf.tensor.quant.q4_0_blocks import BLOCK_NBYTES, BLOCK_VALUES, quantize_rows

__all__ = ["NativeQuantizer", "NativeQuantizing", "native_quantizer", "quickly_quantized_rows"]

SOURCE: Final = Path(__file__).with_name("q4_0_quantize.c")
_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Values of one call: a signal waits for a millisecond or two.
_CALL_VALUES: Final = 1 << 22
_PATIENCE_VALUES: Final = 1 << 28


@final
class NativeQuantizer:
    """The compiled functions. The library lives as long as this."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[torch.dtype, Any] = {}
        for dtype, name in _NAMES.items():
            function = getattr(library, f"quantize_{name}")
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
            function.restype = ctypes.c_int
            self._functions[dtype] = function

    def quantize(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Quantize `rows`, any float (N, K), K % 32 == 0, plain, on the CPU: blocks, uint8 (N, K/32, 18).

        None when there is a value that `quantize_rows` refuses.
        """
        count, columns = rows.shape
        blocks = torch.empty(count, columns // BLOCK_VALUES, BLOCK_NBYTES, dtype=torch.uint8, device=rows.device)
        step = max(1, _CALL_VALUES // max(1, columns))
        for start in range(0, count, step):
            part = rows[start : start + step]
            part = (part if part.dtype in self._functions else part.float()).contiguous()
            into = blocks[start : start + step]
            if self._functions[part.dtype](part.data_ptr(), part.numel() // BLOCK_VALUES, into.data_ptr()):
                return None
        return blocks


def native_quantizer(folder: Path | None = None, *, may_compile: bool = True) -> tuple[NativeQuantizer | None, str]:
    """Give the compiled code, and where it is, or None, and why there is none or why it is not used.

    See `native.native_library` for `folder`, and for what is compiled when.
    """
    library, report = native_library(SOURCE, folder, may_compile=may_compile)
    if library is None:
        return None, report
    try:
        quantizer = NativeQuantizer(library)
    except AttributeError as error:
        return None, f"AttributeError: {error}"
    with _disable_current_modes():
        problem = _probe(quantizer)
    return (quantizer, report) if problem is None else (None, problem)


def _probe(quantizer: NativeQuantizer) -> str | None:
    """Say what does not hold, None when the code gives torch's blocks bit for bit, and refuses what torch refuses."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(70, 3 * BLOCK_VALUES, generator=generator, dtype=torch.float32, device="cpu")
    rows *= torch.logspace(-9, 4, 70, dtype=torch.float32, device="cpu").unsqueeze(1)  # subnormal scales to large ones
    rows[1] = rows[1].round().clamp_(-1, 1)  # zeros of both signs
    rows[65] = rows[65].div_(1000).round_().clamp_(-2, 2)  # the largest magnitude, with both signs
    rows[66], rows[67] = rows[66].abs(), -rows[67].abs()
    for row in (68, 69):  # scales halfway between two numbers of f16: the even one is above, and below
        rows[row] = 8 + (2 * (torch.arange(rows.shape[1], device="cpu") + row) + 1) / 256
    for dtype in _NAMES:
        held = rows.clamp(-60000, 60000).to(dtype)
        found = quantizer.quantize(held)
        if found is None or not torch.equal(found, quantize_rows(held)):
            return f"the compiled code gives other blocks than torch for {dtype}"
        for bad in (float("nan"), float("inf"), -1e6):
            held[66, 5] = bad
            if quantizer.quantize(held) is not None:
                return f"the compiled code takes {bad} in {dtype}"
    return None


@final
class NativeQuantizing:
    """Decides for one process whether rows are quantized by compiled code."""

    def __init__(self, folder: Path | None = None, patience_values: int = _PATIENCE_VALUES) -> None:
        self._compiled = Compiled(
            lambda may_compile: native_quantizer(folder, may_compile=may_compile)[0], patience_values
        )

    def quantize(self, rows: torch.Tensor, name: str = "") -> torch.Tensor:
        """See `q4_0_blocks.quantize_rows`, for `rows` (N, K)."""
        takes = _is_plain(rows) and torch.get_num_threads() <= MOST_THREADS
        quantizer = self._compiled.after(rows.numel()) if takes else None
        blocks = None if quantizer is None else quantizer.quantize(rows)
        return quantize_rows(rows, name) if blocks is None else blocks  # torch says what is wrong with which value


def _is_plain(rows: torch.Tensor) -> bool:
    """Say whether the bytes of `rows` are its values, and nobody records what is done with them."""
    if type(rows) is not torch.Tensor or rows.device.type != "cpu" or rows.is_neg():
        return False
    return not torch._C._len_torch_dispatch_stack() and not torch._C._are_functorch_transforms_active()


_QUANTIZING: Final = NativeQuantizing()
quickly_quantized_rows: Final = _QUANTIZING.quantize
