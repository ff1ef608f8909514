"""Plain tensors as bytes, and bytes as tensors."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch

from t2n_hf.errors import FormatError
from t2n_hf.store.recycled import recycled_buffer

__all__ = ["ALIGNMENT", "aligned_buffer", "buffers_from", "bytes_of", "read_at", "runs_of", "tensor_chunks"]

ALIGNMENT: Final = 64
_CHUNK_NBYTES: Final = 64 << 20


_ALLOCATE: ContextVar[Callable[[int], torch.Tensor] | None] = ContextVar("t2n_hf_allocate", default=None)


@contextmanager
def buffers_from(allocate: Callable[[int], torch.Tensor]) -> Iterator[None]:
    """Have `aligned_buffer` take its buffers from `allocate`, in this thread, for the time of a block."""
    token = _ALLOCATE.set(allocate)
    try:
        yield
    finally:
        _ALLOCATE.reset(token)


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Allocate `nbytes` bytes (uint8, 1-D, CPU, not initialised) that start at a multiple of 64.

    Large ones are mapped, and unmapped or used again once no tensor refers to them: see `store/recycled.py`.
    """
    allocate = _ALLOCATE.get()
    if allocate is not None:
        return allocate(nbytes)
    recycled = recycled_buffer(nbytes)
    if recycled is not None:
        return recycled
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if buffer.data_ptr() % ALIGNMENT == 0:
        return buffer
    buffer = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -buffer.data_ptr() % ALIGNMENT
    return buffer[start : start + nbytes]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype, writable, not copied."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol before 3.12


def tensor_chunks(tensor: torch.Tensor, name: str) -> Iterator[memoryview]:
    """Give the bytes of a plain tensor in row-major order, 64 MiB at most at a time.

    A chunk is a copy only when the tensor is not contiguous or not on the CPU. Raises FormatError, naming `name`, for a
    tensor subclass, a sparse tensor and a meta tensor: their bytes are not their values.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__}, {tensor.layout}, on {tensor.device}"
        raise FormatError(f"{name!r} is a {kind}; expected a plain, dense tensor with values")
    flat = tensor.detach().reshape(-1)
    step = _CHUNK_NBYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        yield bytes_of(flat[start : start + step].cpu().contiguous())


def read_at(fd: int, part: memoryview, offset: int) -> int:
    """Read bytes at `offset` of a file into `part`; return how many there were, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [part], offset)
    data = os.pread(fd, len(part), offset)
    part[: len(data)] = data
    return len(data)


def runs_of(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Join ascending row numbers to runs of neighbours, (first, last + 1) each, which are read at once."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
