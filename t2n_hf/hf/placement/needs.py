"""What the weights of a model take: in memory, on disk, and at once while a module runs. Nothing is loaded for it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import nn

__all__ = ["AtOnce", "Item", "ModelNeeds", "Weight", "needs_of", "stays_in_memory"]

# A vector is read with nearly every token and costs more to look up than to keep.
_KEPT_NBYTES: Final = 16 << 10


def stays_in_memory(value: torch.Tensor) -> bool:
    """Say whether a plain weight is kept in memory even when its module is mapped to disk."""
    return value.dim() < 2 and value.nbytes <= _KEPT_NBYTES


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter, tied ones once, as it will be held.

    `names` are all of its names, `nbytes` is what it takes in memory. `parts`: on disk it is read in so many parts,
    each alone (the rows of a table, fused experts); 1 when it is read whole. `kept`: it stays in memory whatever the
    map says. `spilled` are the bytes that offloading it writes: 0 when the checkpoint holds it as it is. `mapped`: in
    memory it is the checkpoint's own pages.
    """

    names: tuple[str, ...]
    nbytes: int
    parts: int = 1
    kept: bool = False
    spilled: int = 0
    mapped: bool = False

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


class AtOnce(NamedTuple):
    """What a module needs in memory together: so many bytes, most of them for `weight`."""

    module: str
    nbytes: int
    weight: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """One module with weights or buffers of its own: the least that a device map moves.

    `weights` are those it uses, `owned` those that no earlier module has; `buffers` are bytes that stay in memory.
    `by_parts`: weights that can be read in parts are, as embeddings and fused experts do.
    """

    path: str
    by_parts: bool
    weights: tuple[Weight, ...]
    owned: tuple[Weight, ...]
    buffers: int

    @property
    def nbytes(self) -> int:
        """Bytes of all that it owns."""
        return self.buffers + sum(weight.nbytes for weight in self.owned)

    @property
    def kept(self) -> int:
        """Bytes of that which stay in memory when the module is mapped to disk."""
        return self.buffers + sum(weight.nbytes for weight in self.owned if weight.kept)


@dataclass(frozen=True)
class ModelNeeds:
    """All modules with weights, in the order of the model. `cache` gives the bytes of keys and values by module."""

    items: tuple[Item, ...]
    cache: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight once."""
        return tuple(weight for item in self.items for weight in item.owned)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and buffers."""
        return sum(item.nbytes for item in self.items)

    @property
    def cache_nbytes(self) -> int:
        """Bytes of keys and values of all layers."""
        return sum(self.cache.values())

    def at_once(self, offloaded: Collection[str]) -> list[AtOnce]:
        """Say what has to be in memory together for each module that uses weights of `offloaded` (names).

        What the modules around it use themselves is in memory meanwhile, and counts.
        """
        found: list[AtOnce] = []
        around: dict[str, int] = {}
        for item in self.items:
            weights = [w for w in item.weights if w.name in offloaded and not w.kept]
            if not weights:
                continue
            sizes = {w.name: w.nbytes // w.parts if item.by_parts else w.nbytes for w in weights}
            outer = sum(around.get(path, 0) for path in _above(item.path))
            found.append(AtOnce(item.path, sum(sizes.values()) + outer, max(sizes, key=lambda name: sizes[name])))
            if not item.by_parts:
                around[item.path] = sum(sizes.values())
        return found


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def needs_of(
    model: nn.Module,
    describe: Callable[[tuple[str, ...], torch.Tensor], Weight],
    groups: Mapping[str, tuple[str, ...]],
    cache: tuple[int, ...] = (),
) -> ModelNeeds:
    """Collect what the modules of `model` need; `describe` says it of one weight, `groups` which names are tied.

    `cache` are the bytes of each decoder layer's keys and values.
    """
    seen: dict[str, Weight] = {}
    items = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        weights, owned = [], []
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            names = groups.get(prefix + leaf, (prefix + leaf,))
            if names[0] not in seen:
                seen[names[0]] = describe(names, parameter)
                owned.append(seen[names[0]])
            weights.append(seen[names[0]])
        buffers = sum(buffer.nbytes for buffer in module._buffers.values() if buffer is not None)
        if weights or buffers:
            by_parts = isinstance(module, nn.Embedding) or any(
                p is not None and p.dim() > 2 for p in module._parameters.values()
            )
            items.append(
                Item(path=path, by_parts=by_parts, weights=tuple(weights), owned=tuple(owned), buffers=buffers)
            )
    return ModelNeeds(tuple(items), dict(_cache_by_item(model, items, cache)))


def _cache_by_item(model: nn.Module, items: list[Item], cache: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Count each layer's keys and values where the layer is: with the first module of it that has weights."""
    if not cache or not items:
        return
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == len(cache)
    ]
    firsts = [
        next((item.path for item in items if lists and f"{item.path}.".startswith(f"{lists[-1]}.{layer}.")), None)
        for layer in range(len(cache))
    ]
    totals: dict[str, int] = {}
    for first, nbytes in zip(firsts, cache, strict=True):
        path = items[0].path if first is None else first
        totals[path] = totals.get(path, 0) + nbytes
    yield from totals.items()
