"""Which weights of the output are made together, of which stored tensors, and by which rule of the loader."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import WeightConverter

from t2n_hf.errors import FormatError
from t2n_hf.hf.experts import is_by_item
from t2n_hf.hf.key_map import KeyMap
from t2n_hf.hf.quantize.weights import Weight, meta_tensor
from t2n_hf.store.checkpoint import ByteRange, CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Unit", "convert", "units_of"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is made in one go: the weights that come from the same stored tensors.

    `sources` are (pattern, range), in loading order. Without a `converter` there is one, which is only renamed.
    `produced` maps the names that come out to the weights that are kept. `items`: the first axis is made one index at
    a time (single experts), and sources are in the order of that; None: all at once.
    """

    name: str
    sources: tuple[tuple[str, ByteRange], ...]
    converter: WeightConverter | None
    produced: Mapping[str, Weight]
    items: int | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """What is written."""
        return tuple(self.produced.values())

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the tensors that are written."""
        return tuple(key for weight in self.weights for key in weight.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(found.nbytes for _, found in self.sources)

    @property
    def is_streamed(self) -> bool:
        """Whether values are only passed on, cast at most, a chunk at a time."""
        return self.converter is None and all(weight.form is None for weight in self.weights)

    @property
    def step_nbytes(self) -> int:
        """Bytes of stored values that are in memory at once."""
        return 0 if self.is_streamed else self.nbytes // (self.items or 1)

    def step(self, item: int) -> tuple[tuple[str, ByteRange], ...]:
        """Give the sources of one item; all of them when everything is made at once."""
        if self.items is None:
            return self.sources
        if self.converter is None:
            ((pattern, found),) = self.sources
            return ((pattern, found.rows(item, item + 1)),)
        width = len(self.sources) // self.items
        return self.sources[item * width : (item + 1) * width]

    def announce(self, item: int) -> None:
        """Let the system read one item ahead, if there is such an item. Of a weight that is passed on, it does that."""
        if item < (self.items or 1) and not self.is_streamed:
            for _, found in self.step(item):
                found.advise("willneed")


def units_of(
    model: "PreTrainedModel", keys: KeyMap, stored: CheckpointIndex, weights: Iterable[Weight]
) -> Iterator[Unit]:
    """Find what makes each of `weights`, each once. Raises FormatError when the checkpoint has no values for one."""
    known = model.state_dict()
    wanted = {name: weight for weight in weights for name in weight.names}
    unmade = {weight.name for weight in wanted.values()}
    # A tied table that is stored twice is made under its own name.
    for target in sorted(keys.by_target, key=lambda name: name in wanted and wanted[name].name != name):
        if target not in known:
            continue
        unit, names = _unit(model, target, keys, stored)
        produced = {name: wanted[name] for name in names if name in wanted and wanted[name].name in unmade}
        unmade -= {weight.name for weight in produced.values()}
        if produced:
            yield _by_item(replace(unit, produced=produced))
    if unmade:
        names = sorted(unmade)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise FormatError(f"the checkpoint holds no values for {', '.join(names[:3])}{more}")


def _unit(model: "PreTrainedModel", target: str, keys: KeyMap, stored: CheckpointIndex) -> tuple[Unit, Iterable[str]]:
    """Find what `target` is made of, and the names of all that comes out with it."""
    entries = keys.by_target[target]
    converter = keys.converters.get(entries[0][0])
    sources = tuple((pattern, stored[key]) for pattern, key in (entries if converter else entries[:1]))
    unit = Unit(name=target, sources=sources, converter=converter, produced={})
    if converter is None:
        return unit, [target]
    values = [meta_tensor(found.shape, found.dtype) for _, found in sources]
    return unit, convert(unit, sources, values, model)


def convert(
    unit: Unit, sources: Iterable[tuple[str, ByteRange]], values: list[torch.Tensor], model: "PreTrainedModel"
) -> dict[str, torch.Tensor]:
    """Run the loader's own rule on `values`, those of `sources`; gives new values by name. Empties the list.

    Raises FormatError when the rule fails.
    """
    rule: Any = deepcopy(unit.converter)
    for pattern, _ in sources:
        rule.collected_tensors[pattern].append(_Given(values.pop(0)))
    try:
        made = rule.convert(unit.name, model=model, config=model.config)
    except Exception as error:
        names = ", ".join(found.name for _, found in unit.sources[:3])
        raise FormatError(f"{unit.name} cannot be made of {names} ...: {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _Given:
    """A value in the form that the loader's rules take: they call it, once. Nothing else keeps the value."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value: torch.Tensor | None = value

    def __call__(self) -> torch.Tensor | None:
        value, self._value = self._value, None
        return value


def _by_item(unit: Unit) -> Unit:
    """Have a unit made one index of the first axis (one expert) at a time, when its rule and its class allow it."""
    if len(unit.produced) != 1 or unit.is_streamed:
        return unit
    (weight,) = unit.weights
    if len(weight.shape) < 3 or not weight.is_stored_by_item:
        return unit
    count = weight.shape[0]
    if unit.converter is None:
        return replace(unit, items=count) if unit.sources[0][1].shape == weight.shape else unit
    groups: dict[str, list[ByteRange]] = {}
    for pattern, found in unit.sources:
        groups.setdefault(pattern, []).append(found)
    if any(len(group) != count for group in groups.values()) or not all(map(is_by_item, unit.converter.operations)):
        return unit
    sources = tuple((pattern, group[item]) for item in range(count) for pattern, group in groups.items())
    return replace(unit, items=count, sources=sources)
