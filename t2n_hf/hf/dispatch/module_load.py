"""Loading into any module: weights are found, checked and placed as planned; it changes only when all are there."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from t2n_hf.errors import FormatError
from t2n_hf.hf.calibration.importance import importance_for
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.placement.cache_size import cache_nbytes_of
from t2n_hf.hf.placement.device_map import Placement
from t2n_hf.hf.placement.needs import ModelNeeds, Weight, needs_of
from t2n_hf.hf.placing import Placing
from t2n_hf.hf.plan import make_plan, tied_groups
from t2n_hf.hf.sources import CheckpointSources, MappedPages
from t2n_hf.hf.stored import StoredForms, key_of_part
from t2n_hf.hf.weights import weights_of
from t2n_hf.store.checkpoint import ByteRange
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor

__all__ = ["ModuleLoad"]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


@dataclass(kw_only=True)
class ModuleLoad:
    """One load into `model`. Values come from `index`, else from `given`, else are those that the model has.

    `dtype` is what float weights become, None: what they are in the model. `forms` say which weights the checkpoint
    holds packed.
    """

    model: nn.Module
    config: T2NConfig
    placement: Placement
    index: Mapping[str, ByteRange] | None = None
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    forms: StoredForms = field(default_factory=lambda: StoredForms({}))

    def __post_init__(self) -> None:
        self.groups = tied_groups(self.model)
        self.placement.tie(self.groups)
        self.files = tuple({r.file.path.absolute(): None for r in (self.index or {}).values()})
        plan = make_plan(self.model, self.config)
        if self.forms:  # what the checkpoint holds plainly was left so
            plan = {name: replace(choice, format=None, transposed=False) for name, choice in plan.items()}
        self.placing = Placing(
            model=self.model,
            config=self.config,
            plan=plan,
            placement=self.placement,
            dtype=self.dtype or torch.get_default_dtype(),
            forms=self.forms,
            packed=bool(self.forms),
            pages=MappedPages(self.files),
            sources=None if self.index is None else CheckpointSources.by_name(self.index),
            importance={} if self.forms else importance_for(self.model, plan, self.config.importance),
        )

    # ---- before anything is read ----------------------------------------------------------------------------------

    def check_names(self, strict: bool, where: object) -> None:
        """Compare the names and shapes of the checkpoint with those of the model.

        Raises FormatError for shapes that differ, for weights without any value, and with `strict` for names that are
        only on one side; otherwise those of the checkpoint are warned about, and the model keeps its own values.
        """
        assert self.index is not None
        known = weights_of(self.model)
        used: set[str] = set()
        missing = []
        for names in self._names(known):
            keys = [key for name in names for key in self._keys_of(name)]
            used.update(keys)
            if not keys:
                missing.append(names[0])
            self._check_shape(names, known[names[0]], where)
        unexpected = sorted(set(self.index) - used)
        if strict and (missing or unexpected):
            said = [f"holds no values for {_some(missing)}"] if missing else []
            said += [f"has {_some(unexpected)}, which the model lacks"] if unexpected else []
            raise FormatError(f"{where} {' and '.join(said)}; take the checkpoint of this model, or strict=False")
        if unexpected:
            warnings.warn(f"{where} has {_some(unexpected)}, which {type(self.model).__name__} lacks", stacklevel=4)
        self.refuse_empty(where)

    def refuse_empty(self, where: object) -> None:
        """Raise FormatError for weights and buffers on the meta device that nothing gives a value to."""
        known = weights_of(self.model)
        empty = [n[0] for n in self._names(known) if known[n[0]].is_meta and not self._has_value(n)]
        empty += [n for n, buffer in self.model.named_buffers() if buffer.is_meta and n not in known]
        if empty:
            raise FormatError(
                f"{where} holds no values for {_some(empty)}, which {type(self.model).__name__} has on the meta "
                "device; make it with accelerate.init_empty_weights(), which leaves buffers real, or take a checkpoint "
                "that has them under these names (from_pretrained also knows older ones)"
            )

    def needs(self) -> ModelNeeds:
        """Say what the model takes once it is loaded."""
        dtype = self.dtype or next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        cache = cache_nbytes_of(self.model, self.config.max_length, self.config.batch_size, dtype)
        return needs_of(self.model, self._describe, self.groups, cache)

    def _describe(self, names: tuple[str, ...], parameter: torch.Tensor) -> Weight:
        if isinstance(parameter, OffloadedTensor) and not self._has_value(names):
            return Weight(names=names, nbytes=parameter.nbytes_loaded)
        if isinstance(parameter, OpaqueTensor) and not self._has_value(names):
            return Weight(names=names, nbytes=parameter.opaque_nbytes, spilled=parameter.opaque_nbytes)
        wanted = torch.empty(parameter.shape, dtype=self._dtype_of(parameter), device="meta")
        return self.placing.describe(names, wanted)

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _names(self, known: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Give the names of each weight and persistent buffer, together when they are one."""
        seen: set[str] = set()
        for name in known:
            names = self.groups.get(name, (name,))
            if names[0] not in seen:
                seen.add(names[0])
                yield names

    def _keys_of(self, name: str) -> list[str]:
        assert self.index is not None
        if name in self.index:
            return [name]
        form = self.placing.form_of(name)
        keys = [] if form is None else [key_of_part(name, part) for part in form.parts]
        return keys if all(key in self.index for key in keys) else []

    def _has_value(self, names: tuple[str, ...]) -> bool:
        stored = self.index is not None and any(self._keys_of(name) for name in names)
        return stored or any(name in self.given for name in names)

    def _check_shape(self, names: tuple[str, ...], wanted: torch.Tensor, where: object) -> None:
        for name in names:
            found = self.index[name].shape if self.index is not None and name in self.index else None
            if found is not None and found != tuple(wanted.shape):
                raise FormatError(
                    f"{where}: {name} has shape {tuple(found)}, the model has {tuple(wanted.shape)}; take the "
                    "checkpoint that belongs to the model"
                )

    # ---- reading --------------------------------------------------------------------------------------------------

    def placed(self) -> dict[str, torch.Tensor]:
        """Read and place every weight and buffer; the model is left as it is. Keys are first names.

        Raises QuantizationError, FormatError and StorageError.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        found: dict[str, torch.Tensor] = {}
        for names in self._names(parameters):
            found[names[0]] = self._parameter(names, parameters[names[0]])
        for name, buffer in self.model.named_buffers():
            value = self._plain_value(self.groups.get(name, (name,)), buffer)
            found[name] = self.placing.settled(name, value)
        return found

    def _parameter(self, names: tuple[str, ...], old: torch.Tensor) -> nn.Parameter:
        dtype = self._dtype_of(old)
        wanted = torch.empty(old.shape, dtype=dtype, device="meta")
        packed = next((name for name in names if self.index is not None and self._is_packed(name)), None)
        if packed is not None:
            parts = {part: r.mapped() for part, r in self.placing.ranges_of_parts(packed).items()}
            return self._like(old, self.placing.rebuilt(packed, parts, wanted), names[0])
        if isinstance(old, OpaqueTensor) and not self._has_value(names):
            return self._like(old, self.placing.moved(names[0], self._held(old, names[0])), names[0])
        key = next((name for name in names if self.index is not None and name in self.index), None)
        if key is None or self.index is None:
            value = self._plain_value(names, old)
            return self._like(old, self.placing.placed(names[0], value, None, dtype), names[0])
        found: ByteRange = self.index[key]
        stays = self.placing.stays_plain(names[0])
        value = found.read().to(dtype) if stays else found.mapped()
        return self._like(old, self.placing.placed(names[0], value, key, dtype), names[0])

    def _held(self, old: OpaqueTensor, name: str) -> torch.Tensor:
        """Give a weight that the module has already; from where it is on disk, when the map has it in memory."""
        if not isinstance(old, OffloadedTensor) or not self.placement.asked or self.placement.on_disk(name):
            return old.detach()
        value = old.reload(torch.device("cpu"))
        return value if old.pool is None else value.clone()  # the pool keeps its own

    def _is_packed(self, name: str) -> bool:
        return self.index is not None and name not in self.index and bool(self._keys_of(name))

    def _plain_value(self, names: tuple[str, ...], old: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype_of(old)
        for name in names:
            if self.index is not None and name in self.index:
                return self.index[name].read().to(dtype)
            if name in self.given:
                return self.given[name].detach().to(dtype)
        return old.detach().to(dtype)

    def _like(self, old: torch.Tensor, new: torch.Tensor, name: str) -> nn.Parameter:
        plain = not isinstance(new, OpaqueTensor)
        if not self.placement.asked and not old.is_meta:
            new = new.to(old.device)
        parameter = nn.Parameter(new.detach(), requires_grad=plain and old.requires_grad)
        if isinstance(parameter, OpaqueTensor):
            parameter.name = name
        return parameter

    def install(self, found: Mapping[str, torch.Tensor]) -> list[tuple[dict[str, Any], str, Any]]:
        """Put what `placed` gave into the model. Returns what was there, to be put back: (where, name, value)."""
        replaced: list[tuple[dict[str, Any], str, Any, str]] = []
        first = {name: names[0] for name, names in self.groups.items()}
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            for store in (module._parameters, module._buffers):
                for leaf, old in store.items():
                    name = first.get(prefix + leaf, prefix + leaf)
                    if old is not None and name in found:
                        replaced.append((store, leaf, old, name))
        for store, leaf, _, name in replaced:
            store[leaf] = found[name]
        return [(store, leaf, old) for store, leaf, old, _ in replaced]
