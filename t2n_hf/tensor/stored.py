"""Where the values of an offloaded tensor are: a byte range of the user's file, a private spill, or memory.

What is stored never changes in place. A write puts the new values into a spill and lets the source point there: readers
that are under way keep what they read, copies of the tensor keep what they had, and the user's files are never written.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from t2n_hf.contract import SupportsOffloadState
from t2n_hf.errors import FormatError, InPlaceError, StorageError, UnsupportedOpError
from t2n_hf.store.memory import aligned_buffer
from t2n_hf.store.spill import SpillRange, shared_spill
from t2n_hf.tensor.contents import Content, MemoryContent, RangeContent, SpillContent
from t2n_hf.tensor.device_copy import Transfer, transfer_to
from t2n_hf.tensor.row_steps import RowSteps, row_steps
from t2n_hf.tensor.wrapper import OpaqueTensor

if TYPE_CHECKING:
    from t2n_hf.residency import TensorResidencyPool

__all__ = ["StoredSource", "spilled"]

_NUMBERS: Final = itertools.count()


def spilled(value: torch.Tensor, folder: str | Path | None, name: str) -> SpillContent:
    """Put `value`, plain or of a class with an offload state, into the spill of `folder`.

    Raises UnsupportedOpError for an opaque class without a state, FormatError for a plain tensor that has no values or
    is not dense, StorageError, naming folder and tensor, when nothing can be written there.
    """
    if not isinstance(value, OpaqueTensor):
        return SpillContent(_put(_plain(value, name), folder, name), None)
    if not isinstance(value, SupportsOffloadState):
        raise UnsupportedOpError(
            f"{name}: a {type(value).__name__} has no offload state and cannot be offloaded; "
            "give its class SupportsOffloadState, or offload value.to_base_tensor()"
        )
    _pack(value)
    return SpillContent(_put(value.to_private_state(), folder, name), type(value))


def _plain(value: torch.Tensor, name: str) -> torch.Tensor:
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        raise FormatError(
            f"{name or 'the tensor'} is {value.dtype}, {value.layout}, on {value.device}; only a dense tensor with "
            "values can be offloaded"
        )
    # A view that conjugates or negates holds other bytes than its values.
    return value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()


def _put(value: Any, folder: str | Path | None, name: str) -> SpillRange:  # noqa: ANN401 - a tensor or a state
    try:
        return shared_spill(folder).put(value)
    except StorageError as error:
        raise _naming(error, name) from error


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make tensors that can be used anywhere, whatever is going on where they are asked for: pools keep them.

    One that is made in inference mode could not be used for training later, one inside of `torch.func.jvp` has no
    memory of its own to read into.
    """
    transformed = torch._C._are_functorch_transforms_active()
    untransformed = temporarily_clear_interpreter_stack() if transformed else nullcontext()
    with untransformed, torch.inference_mode(False), torch.no_grad():
        yield


def _naming(error: StorageError, name: str) -> StorageError:
    """Put the tensor's name before a message that lacks it."""
    text = error.strerror or str(error)
    if not name or name in text:
        return error
    return StorageError(error.errno, f"{name}: {text}") if error.errno is not None else StorageError(f"{name}: {text}")


def _pack(value: torch.Tensor) -> None:
    """Let a weight that uses a kernel take its layout now: once, and not each time it is loaded."""
    if not isinstance(value, OpaqueTensor):
        return
    if getattr(value, "compute", "exact") != "exact" and hasattr(value, "pack_for_kernel"):
        value.pack_for_kernel()
    for part in value._parts().values():
        _pack(part)


@final
class StoredSource:
    """What a pool loads: the value of an offloaded tensor, as a tensor of `dtype`. Shared by every alias of the tensor.

    `pool` is the pool that the tensor is bound to, `spill_folder` where writes go.
    """

    def __init__(
        self,
        content: Content,
        shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        *,
        spill_folder: str | Path | None = None,
        pool: "TensorResidencyPool | None" = None,
    ) -> None:
        self.key = f"{name or 'unnamed'}#{next(_NUMBERS)}"
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.spill_folder = spill_folder
        self.pool = pool
        self.version = 0
        self._content = content
        self._lock = threading.Lock()

    @classmethod
    def spilling(
        cls, value: torch.Tensor, name: str, folder: str | Path | None, pool: "TensorResidencyPool | None" = None
    ) -> "StoredSource":
        """Put `value` into the spill of `folder`, see `spilled`, and give its source."""
        return cls(spilled(value, folder, name), value.shape, value.dtype, name, spill_folder=folder, pool=pool)

    @property
    def content(self) -> Content:
        """Where the values are now."""
        return self._content

    @property
    def nbytes(self) -> int:
        """Bytes in memory once loaded: of a packed value those of its parts."""
        content = self._content
        return self.shape.numel() * self.dtype.itemsize if content.kind is None else content.nbytes

    def load(self, device: torch.device) -> torch.Tensor:
        """Read the value: a plain tensor of this shape and dtype, or the packed one acting as such."""
        content = self._content
        with _ordinary_tensors():
            if device.type == "meta":
                return torch.empty(self.shape, dtype=self.dtype, device=device)
            transfer = transfer_to(device)
            if transfer is not None:
                return self._transferred(content, transfer, device)
            try:
                value = content.read(device)
            except StorageError as error:
                raise _naming(error, self.name) from error
            if content.kind is None and value.device == device and value.dtype != self.dtype:
                return aligned_buffer(self.nbytes).view(self.dtype).view(self.shape).copy_(value)
            loaded = value.to(device=device, dtype=self.dtype)
            return loaded.clone() if isinstance(content, MemoryContent) and loaded is value else loaded

    def steps(self, slot_nbytes: int) -> RowSteps | None:
        """Say how a plain weight that lies in one range of a file, as it is, is read into slots of so many bytes."""
        content = self._content
        if not isinstance(content, RangeContent) or len(content.ranges) != 1 or content.dtype != self.dtype:
            return None
        return row_steps(content.ranges[0], self.shape, slot_nbytes)

    def _transferred(self, content: Content, transfer: Transfer, device: torch.device) -> torch.Tensor:
        """Read the value and copy it to an accelerator; it is cast there."""
        try:
            with transfer.reading():
                value = content.read(device)
                aliases = device.type == "cpu"  # the staging memory, which is used again
                loaded = value.to(device, non_blocking=content.kind is None, copy=aliases).to(self.dtype)
        except StorageError as error:
            raise _naming(error, self.name) from error
        transfer.arrived(loaded)
        return loaded

    def gather(self, rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """Read the rows at ascending indices and nothing else; None when that cannot be done."""
        with _ordinary_tensors():
            try:
                found = self._content.gather(rows, self.shape)
            except StorageError as error:
                raise _naming(error, self.name) from error
            return None if found is None else found.to(device=device, dtype=self.dtype)

    def advise(self) -> None:
        """Let the system read the stored bytes ahead of a `load`. Returns at once; never raises."""
        self._content.advise()

    def store(self, value: torch.Tensor) -> None:
        """Make `value` the stored value: into a spill. Pools see by the version that theirs is stale."""
        self._put(value, None)

    def replace(self, value: torch.Tensor, version: int) -> int | None:
        """Store `value` in place of that of `version`: give the new version; None, and store nothing, if it changed."""
        return self._put(value, version)

    def _put(self, value: torch.Tensor, version: int | None) -> int | None:
        if value.shape != self.shape:
            raise InPlaceError(
                f"{self.name}: a value of shape {tuple(value.shape)} cannot replace one of {tuple(self.shape)}"
            )
        content = spilled(value, self.spill_folder, self.name)
        with self._lock:
            if version not in (None, self.version):
                return None
            self._content = content
            self.version += 1
            return self.version

    def fork(self, dtype: torch.dtype | None = None, pool: Any = None) -> "StoredSource":  # noqa: ANN401
        """Give a source of its own over the same values; writes to one are not seen by the other."""
        return StoredSource(
            self._content, self.shape, dtype or self.dtype, self.name, spill_folder=self.spill_folder, pool=pool
        )
