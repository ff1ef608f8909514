"""Values on their way to an accelerator: read into pinned memory, copied on a stream beside the one that computes.

A transfer is chosen by the kind of device: CUDA has one, others copy as torch does. Reading and the copy happen in the
thread that loads (a pool's worker, for what is loaded ahead); the value is there when that thread is done.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, final

import torch

from t2n_hf.store.memory import buffers_from
from t2n_hf.tensor.wrapper import OpaqueTensor

__all__ = ["CudaTransfer", "Staging", "Transfer", "host_copy", "transfer_to", "use_transfer"]


class Transfer(Protocol):
    """How values get to one device."""

    def reading(self) -> AbstractContextManager[None]:
        """While it is entered, values are read and copied; at its end the copies are complete."""

    def arrived(self, value: torch.Tensor) -> None:
        """Note that `value` was copied: its memory is not used again before what computes with it is done."""


@final
class Staging(threading.local):
    """Buffers of memory that a device copies from fast; each thread has its own, used again for each value."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Give `nbytes` bytes (uint8, 1-D) that start at a multiple of 64, valid until `reset`."""
        start = -(-self._used // 64) * 64
        if not self._chunks or start + nbytes > self._chunks[-1].numel():
            self._chunks.append(self._allocate(nbytes))
            start = 0
        self._used = start + nbytes
        return self._chunks[-1][start : start + nbytes]

    def reset(self) -> None:
        """Let all that was taken be used again, in one piece from now on."""
        if len(self._chunks) > 1:
            nbytes = sum(-(-chunk.numel() // 64) * 64 for chunk in self._chunks)
            self._chunks.clear()
            self._chunks.append(self._allocate(nbytes))
        self._used = 0


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@final
class CudaTransfer:
    """Copies to one CUDA device on a stream of its own.

    Memory that is let go while the device still computes with it is not free yet. So that a budget holds on the device
    too, a load waits until what was computed two loads ago is done: the CPU cannot run further ahead than that.
    """

    _AHEAD: Final = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._staging = Staging(_pinned)
        self._lock = threading.Lock()
        self._computed: deque[torch.cuda.Event] = deque()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read into pinned memory, and copy on the stream of this transfer; wait for the copies at the end."""
        self._wait_for_compute()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream), buffers_from(self._staging.take):
                yield
        finally:
            self.stream.synchronize()
            self._staging.reset()

    def _wait_for_compute(self) -> None:
        event = torch.cuda.default_stream(self.device).record_event()
        with self._lock:
            self._computed.append(event)
            oldest = self._computed.popleft() if len(self._computed) > self._AHEAD else None
        if oldest is not None:
            oldest.synchronize()

    def arrived(self, value: torch.Tensor) -> None:
        """Tie the memory of `value` to the stream that computes: it was allocated on that of the copies."""
        computes = torch.cuda.default_stream(self.device)
        for tensor in _plain_parts(value):
            if tensor.device == self.device:
                tensor.record_stream(computes)


def _plain_parts(value: torch.Tensor) -> Iterator[torch.Tensor]:
    if isinstance(value, OpaqueTensor):
        for part in value._parts().values():
            yield from _plain_parts(part)
    else:
        yield value


_MAKERS: Final[dict[str, Callable[[torch.device], Transfer]]] = {"cuda": CudaTransfer}
_TRANSFERS: Final[dict[torch.device, Transfer]] = {}
_LOCK: Final = threading.Lock()


def transfer_to(device: torch.device) -> Transfer | None:
    """Give the transfer of a device, None for one that torch copies to (the CPU among them)."""
    make = _MAKERS.get(device.type)
    if make is None:
        return None
    with _LOCK:
        if device not in _TRANSFERS:
            _TRANSFERS[device] = make(device)
        return _TRANSFERS[device]


@contextmanager
def use_transfer(device_type: str, make: Callable[[torch.device], Transfer]) -> Iterator[None]:
    """Have values go to devices of this type through what `make` gives, for the time of a block."""
    with _LOCK:
        before = _MAKERS.get(device_type)
        kept = {device: t for device, t in _TRANSFERS.items() if device.type == device_type}
        for device in kept:
            del _TRANSFERS[device]
        _MAKERS[device_type] = make
    try:
        yield
    finally:
        with _LOCK:
            for device in [device for device in _TRANSFERS if device.type == device_type]:
                del _TRANSFERS[device]
            _TRANSFERS.update(kept)
            del _MAKERS[device_type]
            if before is not None:
                _MAKERS[device_type] = before


def host_copy(value: torch.Tensor, pin: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """Copy a value, plain or packed, to memory that an accelerator copies from fast (`pin`; None: by torch)."""
    if pin is None:
        pin = torch.Tensor.pin_memory if torch.cuda.is_available() else torch.clone
    if not isinstance(value, OpaqueTensor):
        return pin(value.detach().cpu())
    parts: dict[str, Any] = {name: host_copy(part, pin) for name, part in value._parts().items()}
    return value._rebuild(parts, value.dtype)
