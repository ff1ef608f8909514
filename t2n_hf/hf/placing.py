"""One load: turns each weight that arrives into what was planned for it, and puts it where the device map says."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from t2n_hf.contract import OffloadState, WeightFormat
from t2n_hf.errors import FormatError, T2NError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.disk_sources import StoredParts
from t2n_hf.hf.late import LateWeights
from t2n_hf.hf.packing import ItemPacker, packs_by_item, quantized, rows_at_once
from t2n_hf.hf.placement.device_map import CPU, Placement
from t2n_hf.hf.placement.needs import Weight, stays_in_memory
from t2n_hf.hf.plan import Choice, Plan
from t2n_hf.hf.sampled_error import SampledError
from t2n_hf.hf.sources import CheckpointSources, MappedPages, total_nbytes
from t2n_hf.hf.stored import StoredForm, StoredForms, key_of_part
from t2n_hf.hf.weights import replace_parameter
from t2n_hf.registry import class_of_tag
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.contents import MemoryContent
from t2n_hf.tensor.device_copy import host_copy
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["Placing", "parameter_of"]


def parameter_of(tensor: torch.Tensor, name: str) -> nn.Parameter:
    """Make a parameter of an opaque tensor, without gradient, that knows its name."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    if isinstance(parameter, OpaqueTensor):
        parameter.name = name
    return parameter


def _settle(packed: torch.Tensor) -> None:
    """Let a weight that uses a kernel take its layout now, so that its bytes are those it will have."""
    inner = packed.inner if isinstance(packed, TransposedTensor) else packed
    if getattr(inner, "compute", "exact") != "exact" and hasattr(inner, "pack_for_kernel"):
        inner.pack_for_kernel()


@dataclass(kw_only=True)
class Placing:
    """What one call of from_pretrained knows, from the empty model to the loaded one."""

    model: nn.Module
    config: T2NConfig
    plan: Plan
    placement: Placement
    dtype: torch.dtype
    forms: StoredForms
    pages: MappedPages
    packed: bool = False
    sources: CheckpointSources | None = None
    failures: list[T2NError] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    kinds: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    importance: dict[str, torch.Tensor] = field(default_factory=dict)
    late: LateWeights | None = None

    @property
    def compute(self) -> str:
        """How packed weights compute. The kernels, and the layouts they need, are the CPU's."""
        return self.config.compute if self.placement.execution_device == CPU else "exact"

    def wants(self, name: str) -> bool:
        """Say whether the parameter `name` is to pass through here while it is loaded."""
        choice = self.plan.get(name)
        if choice is None or name in self.released or self.packed:
            return False
        return choice.format is not None or self.placement.on_disk(name) or self.placement.moves

    # ---- before loading -------------------------------------------------------------------------------------------

    def describe(self, names: tuple[str, ...], parameter: torch.Tensor) -> Weight:
        """Say what the parameter with these names (more than one when it is tied) will take, exactly."""
        name, dtype = names[0], parameter.dtype
        shape = tuple(parameter.shape)
        choice = self.plan.get(name, Choice())
        compute = choice.compute(self.compute)
        fast = compute != "exact"
        form = next(filter(None, map(self.form_of, names)), None) if self.packed else None
        if form is not None:
            nbytes = self._stored_resident_nbytes(names, form, shape, compute)
            rows = self._kind_of(form.tag).row_parts(form.meta, shape)
            parts = shape[0] if rows and (len(shape) > 2 or not fast) else 1
            return Weight(names=names, nbytes=nbytes, parts=parts, spilled=nbytes if fast else 0)
        if choice.format is not None and not self.packed:
            nbytes = choice.nbytes(shape, self.compute) or 0
            rows = choice.format.row_parts({}, shape)
            parts = shape[0] if rows and (len(shape) > 2 or not (fast or choice.transposed)) else 1
            return Weight(names=names, nbytes=nbytes, parts=parts, spilled=nbytes)
        nbytes = parameter.numel() * dtype.itemsize
        if stays_in_memory(parameter):
            return Weight(names=names, nbytes=nbytes, kept=True, mapped=True)
        ranges = self._stored_ranges(names)
        cast = any(self.sources is not None and self.sources.torch_dtype(r) != dtype for r in ranges)
        parts = max(1, shape[0]) if len(shape) > 1 else 1
        return Weight(names=names, nbytes=nbytes, parts=parts, spilled=0 if ranges else nbytes, mapped=not cast)

    def _stored_ranges(self, names: tuple[str, ...]) -> list[ByteRange]:
        if self.sources is None:
            return []
        return [self.sources.index[key] for name in names for _, key in self.sources.of(name)]

    def _stored_resident_nbytes(
        self, names: tuple[str, ...], form: StoredForm, shape: tuple[int, ...], compute: str
    ) -> int:
        kind = self._kind_of(form.tag)
        if compute != "exact" and issubclass(kind, WeightFormat):
            return kind.resident_nbytes(shape, compute)
        return max((self.stored_nbytes(name) or 0 for name in names), default=0)

    def _kind_of(self, tag: str) -> Any:  # noqa: ANN401 - a class with an offload state
        if tag not in self.kinds:
            self.kinds[tag] = class_of_tag(tag)
        return self.kinds[tag]

    # ---- as weights arrive ----------------------------------------------------------------------------------------

    def place(self, name: str, value: torch.Tensor, key: str | None = None) -> torch.Tensor:
        """Turn a loaded value into its parameter. `key` is its name in the checkpoint when it was only renamed.

        What cannot be done is kept in `failures`, to be raised when loading ends: transformers would hide it here.
        """
        wanted = self.model.get_parameter(name)
        if value.shape != wanted.shape:
            # Left to transformers, which reports it or starts it anew (ignore_mismatched_sizes).
            self.released.add(name)
            return value
        dtype = value.dtype if value.dtype != self.dtype else wanted.dtype
        if self.sources is None or key not in self.sources.index:
            key = None  # it is the pattern of a rule, which may have changed values
        try:
            return self.placed(name, value, key, dtype)
        except T2NError as error:
            self.failures.append(error)
            return value

    def placed(self, name: str, value: torch.Tensor, key: str | None, dtype: torch.dtype) -> torch.Tensor:
        """Do as `place` does, for a value that fits. Raises QuantizationError and StorageError."""
        choice = self.plan.get(name, Choice())
        if choice.format is None:
            return self._offloaded(name, value, key, dtype) if self.placement.on_disk(name) else self.moved(name, value)
        if (late := self._late(name, value, key, dtype)) is not None:
            return parameter_of(late, name)
        step = 1 if value.dim() > 2 and packs_by_item(choice, value.shape) else rows_at_once(choice, value)
        if step is not None:
            packed = self._packed_by_item(name, value.shape[0], self._items_of(name, value, key, step), dtype)
            return parameter_of(self.moved(name, packed), name)
        stored = self._before_rounding(name, value, key)
        value = value if stored is None else stored.read()
        error = SampledError()
        importance, compute = self.importance.get(name), choice.compute(self.compute)
        packed = quantized(value, choice, dtype=dtype, name=name, compute=compute, importance=importance, error=error)
        self._note_error(name, error)
        _settle(packed)
        self.pages.used(self._stored_values_nbytes(name, value, key), packing=True)
        return parameter_of(self.moved(name, packed), name)

    def _late(self, name: str, value: torch.Tensor, key: str | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Leave a matrix in the checkpoint, to be quantized when it is read; None where it has to be done now."""
        choice = self.plan[name]
        if self.late is None or key is None or not self.placement.on_disk(name):
            return None
        if choice.compute(self.compute) != "exact" or name in self.importance:
            return None
        source = self.late.add(name, value, choice, key=key, dtype=dtype)
        return None if source is None else OffloadedTensor.from_source(source, self.placement.main_device)

    def takes_items(self, name: str, count: int) -> bool:
        """Say whether `place_items` takes parameter `name`, a stack of `count` matrices."""
        if not self.wants(name):
            return False
        shape = tuple(self.model.get_parameter(name).shape)
        return count == shape[0] and packs_by_item(self.plan[name], shape)

    def stacks(self) -> list[str]:
        """Name the parameters that `place_items` takes, if their matrices can be had one at a time."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        return [name for name, shape in shapes.items() if len(shape) > 2 and self.takes_items(name, shape[0])]

    def stored_items(self, name: str) -> tuple[int, Iterator[torch.Tensor]] | None:
        """Give the matrices of parameter `name`, each as it is stored; None when they are not stored as one tensor."""
        shape = tuple(self.model.get_parameter(name).shape)
        found = None if self.sources is None else self.sources.single(name)
        if self.sources is None or found is None or found.shape != shape or not self.takes_items(name, shape[0]):
            return None
        if not self.sources.torch_dtype(found).is_floating_point:
            return None
        return shape[0], (found.rows(item, item + 1).read() for item in range(shape[0]))

    def place_items(self, name: str, count: int, values: Iterable[torch.Tensor]) -> torch.Tensor:
        """Quantize a stack of matrices that come one at a time, each (1, ...), and put it where `name` lives.

        What cannot be done is kept in `failures`, and the empty parameter is given back.
        """
        wanted = self.model.get_parameter(name)
        try:
            packed = self._packed_by_item(name, count, values, wanted.dtype)
            return parameter_of(self.moved(name, packed), name)
        except T2NError as failure:
            self.failures.append(failure)
            return wanted

    def _packed_by_item(
        self, name: str, count: int, values: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        choice, error, importance = self.plan[name], SampledError(), self.importance.get(name)
        packer = ItemPacker(count, choice, dtype=dtype, name=name, importance=importance, error=error)
        for value in values:
            packer.add(value)
            self.pages.used(value.nbytes, packing=True)
            del value
        packed = packer.finish(choice.compute(self.compute))
        self._note_error(name, error)
        _settle(packed)
        return packed

    def _items_of(self, name: str, value: torch.Tensor, key: str | None, step: int) -> Iterator[torch.Tensor]:
        """Give `step` items at a time of what arrived whole, as they are stored when that is wider."""
        stored = self._before_rounding(name, value, key)
        for item in range(0, value.shape[0], step):
            stop = min(item + step, value.shape[0])
            yield value[item:stop] if stored is None else stored.rows(item, stop).read()

    def _note_error(self, name: str, error: SampledError) -> None:
        if error.relative is not None:
            self.errors[name] = error.relative

    def stays_plain(self, name: str) -> bool:
        """Say whether the values of `name` themselves are needed, to stay in memory as they are."""
        return self.plan.get(name, Choice()).format is None and not self.placement.on_disk(name)

    def moved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Put a finished value, plain or packed, where `name` lives. Raises StorageError."""
        kept = not isinstance(value, OpaqueTensor) and stays_in_memory(value)
        if self.placement.on_disk(name) and not kept:
            return self._spilled(name, value)
        if self.placement.in_ram(name) and not kept:
            content = MemoryContent(host_copy(value))
            source = StoredSource(content, value.shape, value.dtype, name, spill_folder=self.config.spill_dir)
            return OffloadedTensor.from_source(source, self.placement.main_device)
        return self.settled(name, value)

    def settled(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Put a value that stays in memory on the device that computes with it."""
        return value.to(self.placement.device_of(name)) if self.placement.asked else value

    def _before_rounding(self, name: str, value: torch.Tensor, key: str | None) -> ByteRange | None:
        """Find the weight as it is stored when the loader has already rounded it to a smaller dtype."""
        return None if self.sources is None else self.sources.wider(name, value, key)

    def _offloaded(self, name: str, value: torch.Tensor, key: str | None, dtype: torch.dtype) -> torch.Tensor:
        """Leave a plain weight in the checkpoint's own bytes; only what has no such bytes is spilled."""
        if stays_in_memory(value):
            return self.settled(name, value.to(dtype, copy=True))
        device = self.placement.main_device
        found = self._range_of(name, value, key)
        if key is None or not isinstance(found, ByteRange) or CheckpointSources.torch_dtype(found) is not value.dtype:
            self.pages.used(self._stored_values_nbytes(name, value, key))  # else nobody has read the mapped file
        if found is None:
            return parameter_of(self._spilled(name, value.to(dtype)), name)
        offloaded = OffloadedTensor.from_byte_range(
            found, name, dtype, device, shape=value.shape, spill_dir=self.config.spill_dir
        )
        return parameter_of(offloaded, name)

    def _stored_values_nbytes(self, name: str, value: torch.Tensor, key: str | None) -> int:
        """Bytes of mapped pages that `value` was made from: it may have been cast since."""
        found = None if self.sources is None else self.sources.single(name, key)
        return value.nbytes if found is None else max(value.nbytes, found.nbytes)

    def _range_of(self, name: str, value: torch.Tensor, key: str | None) -> ByteRange | list[ByteRange] | None:
        """Find the ranges that hold exactly `value`. What came through more than a renaming is compared."""
        if self.sources is None:
            return None
        found = self.sources.single(name, key)
        if found is None or found.shape != tuple(value.shape):
            return self.sources.rows(name, value)
        return found if key is not None or torch.equal(found.read().to(value.dtype), value) else None

    def _spilled(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return OffloadedTensor(value, self.placement.main_device, self.config.spill_dir, name)

    # ---- checkpoints that are packed already ----------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return str(getattr(self.model, "base_model_prefix", ""))

    def form_of(self, name: str) -> StoredForm | None:
        """Give the stored form of parameter `name`, None when it is stored plainly."""
        return self.forms.find(name, self._prefix)

    def stored_nbytes(self, name: str) -> int | None:
        """Bytes that the stored parts of parameter `name` take, None when it is stored plainly."""
        return total_nbytes(self.ranges_of_parts(name).values()) or None

    def stays_on_disk(self, name: str) -> bool:
        """Say whether `name` is a plain weight of a packed checkpoint that is to stay on disk."""
        return name in self.plan and self.form_of(name) is None and self.placement.on_disk(name)

    def ranges_of_parts(self, name: str) -> dict[str, ByteRange]:
        """Give where the stored parts of parameter `name` are."""
        form = self.form_of(name)
        if form is None or self.sources is None:
            return {}
        stored = self.forms.stored_name(name, self._prefix)
        keys = {part: key_of_part(stored, part) for part in form.parts}
        return {part: self.sources.index[key] for part, key in keys.items() if key in self.sources.index}

    def rebuild(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Make the parameter `name` of its stored parts.

        What does not fit together or into the model is kept in `failures`, and the empty parameter is given back.
        """
        wanted = self.model.get_parameter(name)
        try:
            return parameter_of(self.rebuilt(name, parts, wanted), name)
        except T2NError as error:
            self.failures.append(error)
            return wanted

    def rebuilt(self, name: str, parts: dict[str, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        """Do as `rebuild` does, to the shape and dtype of `wanted`. Raises FormatError and StorageError."""
        form = self.form_of(name)
        if form is None or set(parts) != set(form.parts):
            expected = "a plain weight" if form is None else f"parts {', '.join(form.parts)}"
            raise FormatError(
                f"{name}: the checkpoint has parts {', '.join(sorted(parts))}; config.json says {expected}"
            )
        state = OffloadState(tag=form.tag, tensors=parts, meta=dict(form.meta))
        packed: Any = self._kind_of(form.tag).from_offload_state(state, None)
        if packed.shape != wanted.shape:
            raise FormatError(f"{name}: stored with shape {tuple(packed.shape)}, the model has {tuple(wanted.shape)}")
        compute = self.plan.get(name, Choice()).compute(self.compute)
        read = sum(part.nbytes for part in parts.values()) if compute != "exact" else 0
        if self.placement.on_disk(name):
            offloaded = self._stored_on_disk(name, form, state, wanted, compute)
            self.pages.used(read, packing=True)
            return offloaded
        packed = packed.to(wanted.dtype)
        if hasattr(packed, "with_compute"):
            packed = packed.with_compute(compute)
        _settle(packed)
        self.pages.used(read, packing=True)
        return self.moved(name, packed)

    def _stored_on_disk(
        self, name: str, form: StoredForm, state: OffloadState, wanted: torch.Tensor, compute: str
    ) -> torch.Tensor:
        device, spill_dir = self.placement.main_device, self.config.spill_dir
        ranges = self.ranges_of_parts(name)
        if compute != "exact" or not ranges:
            # A kernel's layout is made once and spilled: making it at each load costs more than the product.
            return OffloadedTensor.from_state(state, name, wanted.dtype, device, compute=compute, spill_dir=spill_dir)
        content = StoredParts(name, form, ranges, self.kinds[form.tag])
        source = StoredSource(content, wanted.shape, wanted.dtype, name, spill_folder=spill_dir)
        return OffloadedTensor.from_source(source, device)

    # ---- when everything has arrived ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Do what the loader did not bring by: plain weights of a packed checkpoint, and several weights from one."""
        for name, parameter in list(self.model.named_parameters()):
            if isinstance(parameter, OpaqueTensor) or name in self.released or self.failures:
                continue
            if self.packed and self.stays_on_disk(name):
                dtype = self.dtypes.get(name, parameter.dtype)
                self._replace(parameter, self._offloaded(name, parameter.detach(), None, dtype))
            elif not self.packed and self.wants(name):
                self._replace(parameter, self.place(name, parameter.detach()))
            elif self.placement.moves:
                self._replace(parameter, self.moved(name, parameter.detach()))
        if self.placement.moves:
            self._move_buffers()
        self.pages.copy_out((*self.model.parameters(), *self.model.buffers()))
        self.pages.drop()

    def _move_buffers(self) -> None:
        for path, module in self.model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = self.settled(f"{path}.{leaf}" if path else leaf, buffer)

    def _replace(self, old: nn.Parameter, new: torch.Tensor) -> None:
        if not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        replace_parameter(self.model, old, new)
