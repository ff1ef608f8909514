"""Making the values of a unit: read what is stored, apply the loader's rule, quantize, and hand on bytes."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from t2n_hf.contract import OffloadState
from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import FormatError
from t2n_hf.hf.packing import quantized
from t2n_hf.hf.quantize.units import Unit, convert
from t2n_hf.hf.quantize.weights import Weight, spec_of
from t2n_hf.hf.sampled_error import SampledError
from t2n_hf.hf.stored import StoredForm, key_of_part
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.store.memory import ALIGNMENT, aligned_buffer, bytes_of, tensor_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Made", "UnitMaker"]

_CHUNK_NBYTES: Final = 8 << 20


@dataclass
class Made:
    """What a unit became: forms and errors by parameter name."""

    forms: dict[str, StoredForm] = field(default_factory=dict)
    errors: dict[str, SampledError] = field(default_factory=dict)


class UnitMaker:
    """Makes units, one after another, in one buffer for what is read.

    `dtype` is what the model is loaded in: values are rounded to it before they are quantized exactly as the loader
    rounds them, which reads a weight that is only renamed as it is stored when that is wider. `sink` takes the bytes of
    each tensor in order, and uses them up at once.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        dtype: torch.dtype,
        importance: Mapping[str, torch.Tensor],
        sink: Callable[[str, memoryview], None],
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._importance = importance
        self._sink = sink
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def make(self, unit: Unit) -> Made:
        """Make every weight of `unit` and hand its bytes on.

        Raises QuantizationError naming the weight, FormatError for what the class or the loader's rule cannot do,
        StorageError for bytes that cannot be read or that changed.
        """
        made = Made()
        if unit.is_streamed:
            self._pass_on(unit)
            return made
        for item, values in self._values(unit):
            for name in [name for name in values if name in unit.produced]:
                self._put(unit.produced[name], values.pop(name), item, made)
        return made

    # ---- values as the loader has them ----------------------------------------------------------------------------

    def _pass_on(self, unit: Unit) -> None:
        """Hand on a plain weight, cast a chunk at a time."""
        (weight,) = unit.weights
        ((_, found),) = unit.sources
        stored = _torch_dtype(found)
        for chunk in found.chunks(_CHUNK_NBYTES):
            if stored == weight.dtype:
                self._sink(weight.name, chunk)
            else:
                values = torch.frombuffer(chunk, dtype=stored).to(weight.dtype)
                self._sink(weight.name, bytes_of(values))

    def _values(self, unit: Unit) -> Iterator[tuple[int | None, dict[str, torch.Tensor]]]:
        """Give (item, values by name): each of the unit's items as (1, ...), or everything at once with item None."""
        # Cast before a rule, as the loader does: also when that rounds.
        dtype = unit.weights[0].dtype if unit.weights[0].form is None else self._dtype
        for item in range(unit.items or 1):
            unit.announce(item + 1)
            sources = unit.step(item)
            values = self._read([found for _, found in sources])
            if unit.converter is None:
                made = {unit.name: self._rounded(values.pop())}
            else:
                values = [value.to(dtype) for value in values]
                made = convert(unit, sources, values, self._model)
            yield (None if unit.items is None else item), made
            del made

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        wider = value.is_floating_point() and value.itemsize > self._dtype.itemsize
        return value if wider else value.to(self._dtype)

    def _read(self, ranges: list[ByteRange]) -> list[torch.Tensor]:
        """Read ranges into the buffer, one behind the other. What was read before is overwritten."""
        places, end = [], 0
        for found in ranges:
            places.append(end)
            end += math.ceil(found.nbytes / ALIGNMENT) * ALIGNMENT
        if self._buffer.numel() < end:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = aligned_buffer(end)
        values = []
        for start, found in zip(places, ranges, strict=True):
            flat = self._buffer[start : start + found.nbytes]
            values.append(found.read(flat.view(_torch_dtype(found)).view(found.shape)))
        return values

    # ---- what is written ------------------------------------------------------------------------------------------

    def _put(self, weight: Weight, value: torch.Tensor, item: int | None, made: Made) -> None:
        if weight.form is None:
            self._hand_on(weight.name, value.to(weight.dtype))
            return
        importance = self._importance.get(weight.name)
        if importance is not None and importance.dim() > 1 and item is not None:
            importance = importance[item]
        packed: Any = quantized(
            value,
            weight.choice,
            dtype=weight.dtype,
            name=weight.name,
            compute="exact",
            importance=importance,
            error=made.errors.setdefault(weight.name, SampledError()),
        )
        del value
        state: OffloadState = packed.to_offload_state()
        _check(weight, state, item)
        made.forms[weight.name] = StoredForm(state["tag"], tuple(sorted(state["tensors"])), state["meta"])
        for part, tensor in state["tensors"].items():
            self._hand_on(key_of_part(weight.name, part), tensor)

    def _hand_on(self, key: str, tensor: torch.Tensor) -> None:
        for chunk in tensor_chunks(tensor, key):
            self._sink(key, chunk)


def _torch_dtype(found: ByteRange) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_named(found.dtype).torch)
    return dtype


def _check(weight: Weight, state: OffloadState, item: int | None) -> None:
    """Raise FormatError when a state is not of the form that was planned from an empty weight."""
    assert weight.form is not None
    planned = {part: spec_of(value) for part, value in weight.form["tensors"].items()}
    found = {part: spec_of(value) for part, value in state["tensors"].items()}
    if item is not None:
        planned = {part: type(spec)(spec.dtype, (1, *spec.shape[1:])) for part, spec in planned.items()}
    if found != planned:
        raise FormatError(
            f"{weight.name}: {state['tag']} made the parts {found}, and of an empty weight of this shape {planned}; a "
            "class whose parts depend on values cannot be written in a stream: load the model and use save_pretrained"
        )
