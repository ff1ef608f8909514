"""Which module goes where when only limits are given: device_map "auto", "balanced", "sequential".

Weights that memory has no room for are offloaded: they take turns in what is left of it, which has to hold the largest
of them. The more memory there is, the more weights stay: a limit that is enough is never made too small by raising it.
"""

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from torch import nn

from t2n_hf.hf.placement.device_map import CPU, DISK, Where
from t2n_hf.hf.placement.needs import AtOnce, Item, ModelNeeds

__all__ = ["balanced", "infer_map", "largest_need", "window_beside"]

_UNLIMITED: Final = 1 << 62
_OUTSIZED: Final = 4


def _accelerators(limits: Mapping[Where, int]) -> list[Where]:
    return [device for device, limit in limits.items() if device not in (CPU, DISK) and limit > 0]


def largest_need(needs: Sequence[AtOnce]) -> AtOnce:
    """Give the module that needs most at once; of no bytes when none needs anything."""
    return max(needs, key=lambda need: need.nbytes, default=AtOnce("", 0, ""))


def window_beside(needs: Sequence[AtOnce], readahead_nbytes: int | None) -> int:
    """Bytes to have beside the largest module, so that any two that come next can be loaded while it runs.

    With one only, what computes and what reads wait for each other in turn.
    """
    if readahead_nbytes is not None:
        return readahead_nbytes
    return sum(sorted((need.nbytes for need in needs), reverse=True)[1:3])


class _Trial:
    """One way to share the modules: the first `count` stay on the main device, further devices take what they can."""

    def __init__(self, needs: ModelNeeds, order: Sequence[tuple[Item, ...]], limits: Mapping[Where, int]) -> None:
        self.needs = needs
        self.order = order
        self.devices = _accelerators(limits) or [CPU]
        self.limits = limits

    def assign(self, count: int) -> dict[str, Where | None]:
        """Give each module its device, None for those that are offloaded."""
        found: dict[str, Where | None] = {}
        for block in self.order[:count]:
            found.update({item.path: self.devices[0] for item in block})
        rest = list(self.order[count:])
        for device in self.devices[1:]:
            used = 0
            while rest:
                nbytes = sum(item.nbytes + self.needs.cache.get(item.path, 0) for item in rest[0])
                if used + nbytes > self.limits[device]:
                    break
                used += nbytes
                found.update({item.path: device for item in rest.pop(0)})
        found.update({item.path: None for block in rest for item in block})
        return found

    def sizes(self) -> list[int]:
        """Bytes that the first n modules take on the main device, for n from 0 on."""
        blocks = (sum(item.nbytes + self.needs.cache.get(item.path, 0) for item in block) for block in self.order)
        return list(itertools.accumulate(blocks, initial=0))

    def least(self, found: Mapping[str, Where | None], readahead_nbytes: int | None) -> int:
        """Bytes that the main device has to have: for what stays, and for what takes turns with a window ahead."""
        main = self.devices[0]
        offloaded = _offloaded(self.needs.items, found)
        nbytes = 0
        for item in self.needs.items:
            if found[item.path] == main or found[item.path] is None:
                nbytes += item.buffers + self.needs.cache.get(item.path, 0)
                nbytes += sum(w.nbytes for w in item.owned if w.kept or w.name not in offloaded)
        at_once = self.needs.at_once(offloaded)
        return nbytes + largest_need(at_once).nbytes + window_beside(at_once, readahead_nbytes)


def _offloaded(items: Iterable[Item], found: Mapping[str, Where | None]) -> set[str]:
    """Names of the weights that only offloaded modules use."""
    held = {w.name for item in items if found[item.path] is not None for w in item.weights}
    return {w.name for item in items for w in item.weights if not w.kept and w.name not in held}


def infer_map(
    model: nn.Module,
    needs: ModelNeeds,
    limits: Mapping[Where, int],
    *,
    no_split: Collection[str] = (),
    readahead_nbytes: int | None = None,
) -> dict[str, Where]:
    """Share the modules out: accelerators first, in the order of `limits`; what they cannot hold is offloaded.

    Offloaded weights are in memory ("cpu") as far as its limit goes, and on disk beyond it. Without an accelerator the
    CPU computes, and what it cannot hold is on disk. `no_split` names classes whose modules stay on one device.
    When even the least does not fit, everything is offloaded: `preflight` refuses the result.
    """
    several = len(_accelerators(limits)) > 1
    order = _blocks(model, needs, no_split) if several else [(item,) for item in _by_use(needs)]
    trial = _Trial(needs, order, limits)
    room = limits.get(trial.devices[0], _UNLIMITED)
    sizes = trial.sizes()
    count = len(order)
    while count > 0:
        found = trial.assign(count)
        over = trial.least(found, readahead_nbytes) - room
        if over <= 0:
            break
        # With fewer modules there, those that take turns need no less: as much as is too much has to go at least.
        count = bisect.bisect_right(sizes, sizes[count] - over) - 1
    found = trial.assign(max(0, count))
    return _compressed(model, _tiers(needs, found, limits))


def balanced(
    model: nn.Module, needs: ModelNeeds, limits: Mapping[Where, int], no_split: Iterable[str], how: str
) -> dict[Where, int]:
    """Lower the limits of several accelerators so that each gets about as much; "balanced_low_0": the first least."""
    devices = _accelerators(limits)
    result = dict(limits)
    if len(devices) < 2:
        return result
    low = how == "balanced_low_0"
    blocks = [sum(item.nbytes for item in block) for block in _blocks(model, needs, set(no_split))]
    each = needs.nbytes // (len(devices) - low) + max(blocks, default=0) * 5 // 4
    for device in devices[1 if low else 0 : -1]:
        result[device] = min(limits[device], each)
    if low:
        others = sum(result[device] for device in devices[1:])
        result[devices[0]] = min(limits[devices[0]], max(0, needs.nbytes - others))
    return result


def _by_use(needs: ModelNeeds) -> list[Item]:
    """Put modules that need far more than the others first: they would keep that much room free for their turn.

    Put tables whose rows are read alone last: keeping them in memory saves least. All others follow each other so that
    the first n of them, for any n, are spread over the model: while what is in memory computes, what comes next is
    read, and a long run of it would leave the disk idle.
    """
    at_once = {need.module: need.nbytes for need in needs.at_once({w.name for w in needs.weights})}
    usual = statistics.median(at_once.values()) if at_once else 0
    uses = Counter(weight.name for item in needs.items for weight in item.weights)

    def is_table(item: Item) -> bool:
        return item.by_parts and all(w.parts > 1 and uses[w.name] == 1 for w in item.weights)

    def rank(item: Item) -> int:
        return 2 if is_table(item) else int(at_once.get(item.path, 0) <= _OUTSIZED * usual)

    width = len(needs.items).bit_length()
    spread = sorted(enumerate(needs.items), key=lambda place: f"{place[0]:0{width}b}"[::-1])
    return sorted((item for _, item in spread), key=rank)


def _blocks(model: nn.Module, needs: ModelNeeds, no_split: Collection[str]) -> list[tuple[Item, ...]]:
    """Group the modules that must not be parted, in the order of the model."""
    whole = [path for path, module in model.named_modules() if type(module).__name__ in no_split]
    blocks: dict[str, list[Item]] = {}
    for item in needs.items:
        block = next((path for path in whole if f"{item.path}.".startswith(f"{path}.")), item.path)
        blocks.setdefault(block, []).append(item)
    return [tuple(block) for block in blocks.values()]


def _tiers(needs: ModelNeeds, found: Mapping[str, Where | None], limits: Mapping[Where, int]) -> dict[str, Where]:
    """Say for offloaded modules whether they are in memory or on disk."""
    computes_on_cpu = not _accelerators(limits)
    room = 0 if computes_on_cpu else limits.get(CPU, 0)
    result: dict[str, Where] = {}
    for item in needs.items:
        where = found[item.path]
        if where is None:
            nbytes = item.nbytes - item.kept
            where = CPU if not computes_on_cpu and nbytes <= room else DISK
            room -= nbytes if where == CPU else 0
        result[item.path] = where
    return result


def _compressed(model: nn.Module, found: Mapping[str, Where]) -> dict[str, Where]:
    """Give the shortest map that says the same: a module whose parts are all in one place stands for them."""
    below: dict[str, set[Where]] = {}
    for path, where in found.items():
        while True:
            below.setdefault(path, set()).add(where)
            if not path:
                break
            path = path.rpartition(".")[0]
    result: dict[str, Where] = {}

    def visit(path: str, module: nn.Module) -> None:
        places = below.get(path)
        if places is None:
            return
        if len(places) == 1:
            result[path] = next(iter(places))
            return
        if path in found:
            result[path] = found[path]
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return result
