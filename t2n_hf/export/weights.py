"""Each weight as a `.dat` file: planned before anything is written, then streamed alone, by its owner.

A plain tensor is cast chunk by chunk. A byte range of a checkpoint is copied from its file without becoming a tensor. A
class that has an offload state writes its own payload, packed bytes as they are.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from t2n_hf.contract import InferenceTarget, OffloadState, SupportsOffloadState
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.errors import FormatError
from t2n_hf.export.casts import Cast
from t2n_hf.hf.late import LateContent
from t2n_hf.hf.plan import Choice
from t2n_hf.nnef.dat import (
    BLOCK_FORMATS,
    HEADER_NBYTES,
    Buffer,
    DatHeader,
    Payload,
    dense_payload,
    q4_0_payload,
    q8_1_payload,
    read_header,
)
from t2n_hf.registry import class_of_tag
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import opaque_to_final_tensor
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["PlannedWeight", "Weight", "plan_weight", "total_by_format"]

_CHUNK_NBYTES: Final = 1 << 20
# Of rows that are quantized: each group costs a quarter of a millisecond by itself, and larger ones leave the caches.
_GROUP_NBYTES: Final = 2 << 20
_BLOCK_PAYLOADS: Final = {"q4_0": q4_0_payload, "q8_1": q8_1_payload}


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor that the archive holds.

    Attributes:
        label: of the `.dat` file.
        name: for messages.
        value: parameter, buffer or constant; plain or opaque.
        shape: as stored.
        format: "dense", or the block format of the `.dat`.
        quantize_as: how to quantize the values first; None writes what `value` holds.
        finite: whether NaN, or values that the archive's dtype cannot hold, are refused (they are, of parameters).
    """

    label: str
    name: str
    value: torch.Tensor
    shape: tuple[int, ...]
    format: str = "dense"
    quantize_as: Choice | None = None
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """A weight whose header is known and can be written.

    Attributes:
        open: given a folder for files in between, gives the payload, which holds the values.
        early: opening it is most of the work (it is quantized), and may be done while another one is written.
    """

    label: str
    name: str
    format: str
    header: DatHeader
    open: Callable[[Path], Payload]
    early: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the `.dat` file, header included."""
        return HEADER_NBYTES + self.header.nbytes


def plan_weight(weight: Weight, target: InferenceTarget) -> PlannedWeight:
    """Say what the `.dat` of `weight` will be, without reading its values.

    Raises FormatError, naming the weight, for what no `.dat` file can hold: 4 GiB, rank 9, rows of no whole blocks.
    """
    stored = _stored_dtype(weight, target)
    wanted = weight.shape, weight.format if weight.format in BLOCK_FORMATS else stored
    try:
        header = _fitting(*wanted)
    except FormatError:
        header = _nothing(*wanted).header
        header.check(weight.name)  # says whose it is
    late = _late_content(weight) if weight.format in BLOCK_FORMATS else None
    return PlannedWeight(
        label=weight.label,
        name=weight.name,
        format=header.format,
        header=header,
        open=lambda scratch: _checked(_open(weight, stored, target, scratch), header, weight.name),
        early=late is not None and late.is_kept,
    )


def _late_content(weight: Weight) -> LateContent | None:
    """Give what is quantized when it is read, of a class that the exporter may write as it likes."""
    value = weight.value
    if not isinstance(value, OffloadedTensor) or not isinstance(value.source.content, LateContent):
        return None
    # A class with a way of its own was promised that no other state is in memory.
    owner: Any = value.inner_class
    return value.source.content if weight.format == owner.EXPORT_FORMAT and not _writes_its_own(owner) else None


def _writes_its_own(owner: Any) -> bool:  # noqa: ANN401 - a class with an offload state
    ours: Any = SupportsOffloadState.write_offload_state_in_file
    return owner.write_offload_state_in_file.__func__ is not ours.__func__


@lru_cache(maxsize=256)
def _fitting(shape: tuple[int, ...], format_name: str) -> DatHeader:
    """The header of a `.dat`, which its layers share. Raises FormatError for one that cannot be."""
    header = _nothing(shape, format_name).header
    header.check("?")
    return header


def _nothing(shape: tuple[int, ...], format_name: str) -> Payload:
    make = _BLOCK_PAYLOADS.get(format_name)
    return dense_payload(shape, format_name, tuple) if make is None else make(shape, tuple)


def _stored_dtype(weight: Weight, target: InferenceTarget) -> str:
    dtype = dtype_of(weight.value.dtype)
    # A constant in f32 was computed in f32 by a model of any dtype (rotary frequencies); the graph says its type.
    keeps = not dtype.is_float or (not weight.finite and dtype.name in {"f32", "f16"})
    return dtype.name if keeps else target.dtype


def _checked(payload: Payload, header: DatHeader, name: str) -> Payload:
    """Hold a payload to the plan. A stack of matrices may be planned with one row for each: same bytes, same order."""
    given, planned = payload.header.shape, header.shape
    fits = given == planned or (given[:1] == planned[:1] and math.prod(given[1:]) == math.prod(planned[1:]))
    if fits and payload.header.format == header.format:
        return Payload(header, payload.chunks)
    raise FormatError(
        f"weight {name!r} gave a .dat of shape {list(given)} and format {payload.header.format}; "
        f"the graph expects shape {list(planned)} and format {header.format}"
    )


def _open(weight: Weight, stored: str, target: InferenceTarget, scratch: Path) -> Payload:
    value = weight.value
    if weight.quantize_as is not None:
        return _in_pieces(weight, target, _quantized_groups(weight, weight.quantize_as))
    late = _late_content(weight) if weight.format in BLOCK_FORMATS else None
    if late is not None and not late.is_kept:
        return _in_pieces(weight, target, late.packed_groups(_GROUP_NBYTES))
    owner, state = _owner(_turned(value) if weight.format in BLOCK_FORMATS else value)
    if owner is not None and state is not None and weight.format == owner.EXPORT_FORMAT:
        return _by_owner(owner, state, weight, target, scratch)
    if weight.format in BLOCK_FORMATS:
        raise FormatError(f"weight {weight.name!r} is a {type(value).__name__}, which does not write {weight.format}")
    source = value.source_range if isinstance(value, OffloadedTensor) else None
    name = weight.name if weight.finite and dtype_named(stored).is_float else None
    chunks = _range_chunks(source, stored, name) if source is not None else _tensor_chunks(value, stored, name)
    return dense_payload(weight.shape, stored, chunks)


def _turned(value: torch.Tensor) -> torch.Tensor:
    """Give what a transposed weight is stored as; any other weight as it is."""
    if isinstance(value, OffloadedTensor) and value.inner_class is TransposedTensor:
        value = value.reload()
    return value.inner if isinstance(value, TransposedTensor) else value


def _owner(value: torch.Tensor) -> tuple[type[SupportsOffloadState] | None, OffloadState | None]:
    """Find the class that writes `value`, and the state it writes from."""
    if isinstance(value, OffloadedTensor):
        state = value.stored_state()
        return (None, None) if state is None else (class_of_tag(state["tag"]), state)
    if isinstance(value, SupportsOffloadState):
        return type(value), value.to_offload_state()
    return None, None


def _by_owner(
    owner: type[SupportsOffloadState], state: OffloadState, weight: Weight, target: InferenceTarget, scratch: Path
) -> Payload:
    if not _writes_its_own(owner):
        return owner.dat_payload(state, target)
    owner.write_offload_state_in_file(state, scratch, "weight", target)
    path = scratch / "weight.dat"
    if not path.is_file():
        raise FormatError(f"{owner.__name__} was asked to write {path.name} for weight {weight.name!r} and did not")
    return Payload(read_header(path), lambda: _file_chunks(path))


def _file_chunks(path: Path) -> Iterator[Buffer]:
    with open(path, "rb") as file:
        file.seek(HEADER_NBYTES)
        while chunk := file.read(_CHUNK_NBYTES):
            yield chunk
    path.unlink()


def _in_pieces(weight: Weight, target: InferenceTarget, pieces: Iterable[Any]) -> Payload:
    """Write packed rows, one group after another: the blocks of a row do not depend on other rows."""

    def chunks() -> Iterator[Buffer]:
        for piece in pieces:
            yield from piece.dat_payload(piece.to_offload_state(), target).chunks()

    return _BLOCK_PAYLOADS[weight.format](weight.shape, chunks)


def _quantized_groups(weight: Weight, choice: Choice) -> Iterator[torch.Tensor]:
    assert choice.format is not None
    for rows in _row_groups(weight.value, transposed=choice.transposed):
        yield choice.format.quantize(rows, dtype=torch.float32, name=weight.name)


def _row_groups(value: torch.Tensor, *, transposed: bool) -> Iterator[torch.Tensor]:
    source = value.source_range if isinstance(value, OffloadedTensor) and not transposed else None
    dense = opaque_to_final_tensor(value.detach()) if source is None else value
    dense = dense.transpose(-1, -2) if transposed else dense
    count = dense.shape[0]
    step = max(1, _GROUP_NBYTES // max(1, value.nbytes // max(1, count)))
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield dense[start:stop].contiguous() if source is None else source.rows(start, stop).read()


def _tensor_chunks(value: torch.Tensor, stored: str, name: str | None) -> Callable[[], Iterator[Buffer]]:
    wanted = getattr(torch, dtype_named(stored).torch)

    def chunks() -> Iterator[Buffer]:
        flat = opaque_to_final_tensor(_unrounded(value.detach())).cpu().contiguous().reshape(-1)
        cast = Cast(flat.dtype, wanted, name)
        for start in range(0, flat.numel(), cast.count):
            yield cast(flat[start : start + cast.count])

    return chunks


def _unrounded(value: torch.Tensor) -> torch.Tensor:
    """Let a packed weight give its values as they are, not rounded to the dtype that it acts as."""
    packed = isinstance(value, SupportsOffloadState) or (isinstance(value, OffloadedTensor) and value.inner_class)
    return value.to(torch.float32) if packed else value


def _range_chunks(source: ByteRange, stored: str, name: str | None) -> Callable[[], Iterator[Buffer]]:
    held, wanted = (getattr(torch, dtype_named(kind).torch) for kind in (source.dtype, stored))

    def chunks() -> Iterator[Buffer]:
        cast = Cast(held, wanted, name)
        for chunk in source.chunks(cast.count * held.itemsize):
            yield cast(torch.frombuffer(chunk, dtype=held))

    return chunks


def total_by_format(weights: Iterable[PlannedWeight]) -> dict[str, tuple[int, int]]:
    """Count weights and their bytes by format."""
    totals: dict[str, tuple[int, int]] = {}
    for weight in weights:
        count, nbytes = totals.get(weight.format, (0, 0))
        totals[weight.format] = (count + 1, nbytes + weight.nbytes)
    return totals
