"""Before anything is loaded: what will sit where, the memory and disk that it takes, and refusing what cannot fit."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from t2n_hf.errors import BudgetError, StorageError
from t2n_hf.hf.hooks import window_of
from t2n_hf.hf.placement.device_map import CPU, DISK, Placement, Where
from t2n_hf.hf.placement.infer import largest_need, window_beside
from t2n_hf.hf.placement.machine import device_named, free_disk_nbytes, memory_nbytes, reachable_memory_nbytes
from t2n_hf.hf.placement.needs import AtOnce, Item, ModelNeeds
from t2n_hf.store.spill import Spill

__all__ = ["DeviceRow", "PlacementReport", "preflight"]


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """What one device that computes will hold, in bytes.

    `resident` are weights and buffers that stay, `cache` the keys and values of `max_length` tokens. `budget` is what
    offloaded weights may take at a time (0: the module that runs and no more), `at_once` the most that one module
    needs of them, `ahead` what the budget has beside that for those that come next. `limit` is what the device
    may hold in all, None without one.
    """

    device: str
    resident: int
    cache: int = 0
    budget: int = 0
    at_once: int = 0
    ahead: int = 0
    largest: str = ""
    limit: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that will be held at most."""
        return self.resident + self.cache + max(self.budget, self.at_once)


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """Where everything goes.

    `devices` compute. `waiting` bytes are offloaded to memory for an accelerator. `read_in_place` bytes stay in the
    checkpoint's own files, `spilled` are written to a private file in a folder that has `disk_free` bytes; `memory` is
    what the machine has free. `where` gives "memory", "disk" or the accelerator's name for each weight. `private` is
    what of the weights in memory is no page of the checkpoint that the system can drop and read again.
    """

    devices: tuple[DeviceRow, ...]
    waiting: int = 0
    read_in_place: int = 0
    spilled: int = 0
    disk_free: int = 0
    spill_dir: str = ""
    memory: int = 0
    private: int = 0
    device_map: Mapping[str, Where] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)

    @property
    def budgets(self) -> dict[torch.device, int]:
        """The budget of each device for offloaded weights; only devices that compute with some."""
        return {torch.device(row.device): row.budget for row in self.devices if row.largest}

    def readahead(self, asked: int | None) -> int:
        """Bytes to load ahead of the module that runs: `asked`, else the next two where there is room for them."""
        if asked is not None:
            return asked
        total = self.waiting + self.read_in_place + self.spilled
        return max((max(row.ahead, window_of(row.budget, total)) for row in self.devices if row.largest), default=0)

    @property
    def ram(self) -> int:
        """Bytes of the machine's memory that weights, buffers and caches take at most."""
        return self.waiting + sum(row.nbytes for row in self.devices if row.device == CPU)

    @property
    def disk(self) -> int:
        """Bytes of disk space that loading takes, beside the checkpoint."""
        return self.spilled

    def __str__(self) -> str:
        lines = [f"{'device':<10}{'resident':>16}{'cache':>16}{'offloaded':>16}{'at once':>16}{'limit':>16}"]
        for row in self.devices:
            limit = "none" if row.limit is None else f"{row.limit:,}"
            lines.append(
                f"{row.device:<10}{row.resident:>16,}{row.cache:>16,}{row.budget:>16,}{row.at_once:>16,}{limit:>16}"
            )
            if row.largest:
                lines.append(f"  most at once: {row.largest}")
        lines.append(f"memory: {self.ram:,} bytes needed at most, {self.memory:,} free")
        if self.waiting:
            lines.append(f"  of that {self.waiting:,} wait there for an accelerator")
        lines.append(
            f"disk: {self.read_in_place:,} bytes are read from the checkpoint where they are, {self.spilled:,} are "
            f"written to {self.spill_dir} ({self.disk_free:,} free)"
        )
        return "\n".join(lines)


def preflight(
    needs: ModelNeeds, placement: Placement, *, max_resident_bytes: int | None = None, spill_dir: str | None = None
) -> PlacementReport:
    """Say what a load with this placement will take, and refuse it when it cannot fit.

    Raises BudgetError naming the module, its largest weight and the least that works, when a limit or budget is too
    small, and when the machine has less memory than what stays takes; StorageError when the disk has no room for what
    is to be written to it, or nothing can be written in the folder.
    """
    placement.stays = next((i.path for i in needs.items if _stays_whole(i, needs)), "")
    where = {w.name: placement.where(w.name) for w in needs.weights}
    offloaded = {w.name for w in needs.weights if not w.kept and _is_offloaded(placement, where[w.name])}
    rows = _rows(needs, placement, offloaded, max_resident_bytes)
    on_disk = [w for w in needs.weights if w.name in offloaded and where[w.name] == DISK]
    report = PlacementReport(
        devices=rows,
        waiting=sum(w.nbytes for w in needs.weights if w.name in offloaded and where[w.name] == CPU),
        read_in_place=sum(w.nbytes for w in on_disk if not w.spilled),
        spilled=sum(w.spilled for w in on_disk),
        disk_free=free_disk_nbytes(spill_dir),
        spill_dir=spill_dir or "the system's folder for temporary files",
        memory=memory_nbytes(),
        private=_private(needs, placement, offloaded),
        device_map=placement.true_map(),
        where={name: _place(placement, name, found) for name, found in where.items()},
    )
    _refuse(report, needs, placement, max_resident_bytes)
    if report.spilled:
        Spill(spill_dir).close()
    return report


def _stays_whole(item: Item, needs: ModelNeeds) -> bool:
    if not item.path or not all(weight.kept for weight in item.weights):
        return False
    return not any(other.path.startswith(f"{item.path}.") for other in needs.items)


def _is_offloaded(placement: Placement, where: Where) -> bool:
    return where == DISK or (where == CPU and placement.execution_device != CPU)


def _place(placement: Placement, name: str, where: Where) -> str:
    if where == DISK:
        return "disk"
    return "memory" if where == CPU else str(placement.device_of(name))


def _private(needs: ModelNeeds, placement: Placement, offloaded: Iterable[str]) -> int:
    """Bytes of memory of what stays on the CPU or waits there, that the system cannot take back."""
    computes_here = placement.execution_device == CPU
    kept = sum(
        w.nbytes
        for w in needs.weights
        if not w.mapped and placement.where(w.name) == CPU and (computes_here or w.name in offloaded)
    )
    return kept + (needs.cache_nbytes if computes_here else 0)


def _rows(
    needs: ModelNeeds, placement: Placement, offloaded: set[str], max_resident_bytes: int | None
) -> tuple[DeviceRow, ...]:
    resident: dict[str, int] = {}
    cache: dict[str, int] = {}
    for item in needs.items:
        device = str(placement.device_of(item.path))
        cache[device] = cache.get(device, 0) + needs.cache.get(item.path, 0)
        resident[device] = resident.get(device, 0) + item.buffers
        for weight in item.owned:
            if weight.name not in offloaded:
                place = str(placement.device_of(weight.name))
                resident[place] = resident.get(place, 0) + weight.nbytes
    at_once = needs.at_once(offloaded)
    largest = largest_need(at_once)
    main = str(placement.main_device)
    rows = []
    for device, nbytes in resident.items():
        limit = _limit_of(placement, device)
        computes = device == main and bool(offloaded)
        budget = _budget(nbytes, cache.get(device, 0), limit, max_resident_bytes) if computes else 0
        rows.append(
            DeviceRow(
                device=device,
                resident=nbytes,
                cache=cache.get(device, 0),
                budget=budget,
                at_once=largest.nbytes if computes else 0,
                ahead=max(0, min(budget - largest.nbytes, window_beside(at_once, None))),
                largest=_named(largest) if computes else "",
                limit=limit,
            )
        )
    return tuple(rows)


def _limit_of(placement: Placement, device: str) -> int | None:
    return next((n for key, n in placement.limits.items() if key != DISK and str(device_named(key)) == device), None)


def _budget(resident: int, cache: int, limit: int | None, max_resident_bytes: int | None) -> int:
    budgets = [] if limit is None else [limit - resident - cache]
    budgets += [] if max_resident_bytes is None else [max_resident_bytes - cache]
    return max(0, min(budgets, default=0))


def _named(need: AtOnce) -> str:
    return f"{need.module} needs at once ({need.nbytes}), most of it {need.weight}"


def _beside(cache: int) -> str:
    return f", beside {cache} for keys and values" if cache else ""


def _refuse(report: PlacementReport, needs: ModelNeeds, placement: Placement, max_resident_bytes: int | None) -> None:
    for row in report.devices:
        if max_resident_bytes is not None and max_resident_bytes - row.cache < row.at_once:
            raise BudgetError(
                f"{max_resident_bytes} bytes for weights on disk{_beside(row.cache)} are fewer than {row.largest}. The "
                f"least that works is max_resident_bytes={row.at_once + row.cache}; give that, or quantize the weight"
            )
        least = row.resident + row.cache + row.at_once
        if row.limit is not None and least > row.limit:
            what = f", and what {row.largest}" if row.at_once else ""
            raise BudgetError(
                f"max_memory gives {row.device} {row.limit} bytes, fewer than what the device map puts there "
                f"({row.resident}{_beside(row.cache)}{what}). The least that works with this map is {least}; give "
                'that, map more to "disk", or quantize'
            )
    limit = _limit_of(placement, CPU) if report.waiting else None
    if limit is not None and report.waiting > limit:
        raise BudgetError(
            f"max_memory gives {CPU} {limit} bytes, fewer than what waits there for {placement.execution_device} "
            f'({report.waiting}); give that, or map more to "disk"'
        )
    if report.private > reachable_memory_nbytes():
        raise BudgetError(
            f"what stays in memory takes {report.private} bytes, this machine has {reachable_memory_nbytes()}; map "
            'more of the model to "disk", or quantize it'
        )
    if report.spilled > report.disk_free:
        raise StorageError(
            errno.ENOSPC,
            f"{report.spilled} bytes are to be written to {report.spill_dir}, which has {report.disk_free} free; name "
            "another folder (spill_dir, --spill-dir), keep more in memory, or load a checkpoint that is quantized",
        )
