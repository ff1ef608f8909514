"""Where each weight lives: what a device map says, with tied weights in one place.

transformers' and accelerate's own offload throws quantized results away, resaves what it cannot index, and leaves
parameters on meta. So they are shown a map with one device, and what was asked for is remembered here.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.hf.placement.machine import device_named

__all__ = ["CPU", "DISK", "PLANNED_MAPS", "Placement", "Where", "check_names", "checked_map"]

DISK: Final = "disk"
CPU: Final = "cpu"
PLANNED_MAPS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
Where: TypeAlias = str | int | torch.device


def _normal(where: Where) -> Where:
    """Write the CPU, however it is named, as "cpu"."""
    return CPU if isinstance(where, torch.device) and where.type == CPU else where


def _place(where: Where) -> Where:
    """Give the same for one place, however it is named. A machine has accelerators of one kind."""
    where = _normal(where)
    if where in (CPU, DISK) or isinstance(where, int):
        return where
    return torch.device(where).index or 0


def checked_map(device_map: Mapping[Any, Any]) -> dict[str, Where]:
    """Copy a map. Raises ConfigError when it is not one from names to devices that exist."""
    for name, where in device_map.items():
        is_place = isinstance(where, (str, int, torch.device)) and not isinstance(where, bool)
        if not isinstance(name, str) or not is_place:
            raise ConfigError(f'device_map has {name!r}: {where!r}; expected a module\'s name and a device, or "disk"')
        if where != DISK and device_named(where).type == "meta":
            raise ConfigError(f'device_map has {name!r} on the meta device, where no values are; map it to "disk"')
    return dict(device_map)


def check_names(model: nn.Module, device_map: Mapping[str, Where]) -> None:
    """Compare a map with a model, as accelerate does: names that mean nothing are warned about.

    Raises ConfigError for weights and buffers that the map gives no device.
    """
    known = {"", *(name for name, _ in model.named_modules()), *model.state_dict()}
    unused = [name for name in device_map if name not in known]
    if unused:
        warnings.warn(f"device_map names what the model does not have: {', '.join(unused)}", stacklevel=4)
    left = [n for n in model.state_dict() if not any(not k or f"{n}.".startswith(f"{k}.") for k in device_map)]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ConfigError(
            f'the device map does not give any device for {", ".join(left[:3])}{more}; add them, or "" for the rest'
        )


class Placement:
    """The device map that the user meant: with "disk", and with tied weights in one place.

    A map may come twice: the user's own (a dict), and the one that "auto" was resolved to. `limits` are bytes by
    device, `main` is what computes offloaded weights when it is not the first accelerator, `stays` a module whose
    weights and buffers are in memory whatever the map says ("": none is known).
    """

    def __init__(self) -> None:
        self.asked: dict[str, Where] = {}
        self.limits: dict[Where, int] = {}
        self.main: Where | None = None
        self.stays = ""
        self._groups: Mapping[str, tuple[str, ...]] = {}

    def take(self, device_map: Mapping[str, Where]) -> dict[str, Any]:
        """Remember `device_map`; return the map to show to transformers. Changes nothing in place.

        Where there is more than one place, weights are loaded on the CPU one by one and go from there.
        """
        self.asked = dict(device_map)
        places = {_place(where) for where in device_map.values()}
        if len(places) == 1 and DISK not in places:
            return dict(device_map)
        return dict.fromkeys(device_map, CPU)

    def tie(self, groups: Mapping[str, tuple[str, ...]]) -> None:
        """Say which names are one weight. It is on disk only when all of its names are."""
        self._groups = groups

    def complete(self, model: nn.Module) -> None:
        """Put what the map does not name on the CPU, as transformers does."""
        if self.asked and "" not in self.asked:
            for path in _uncovered(model, self.asked, self._groups):
                self.asked[path] = CPU

    @property
    def execution_device(self) -> Where:
        """Where offloaded weights are computed with: the first accelerator in the map, else the CPU."""
        if self.main is not None:
            return _normal(self.main)
        devices = [where for where in map(_normal, self.asked.values()) if where not in (DISK, CPU)]
        return devices[0] if devices else CPU

    @property
    def main_device(self) -> torch.device:
        """The same as a device."""
        return device_named(self.execution_device)

    @property
    def uses_disk(self) -> bool:
        """Whether anything is mapped to disk."""
        return DISK in self.asked.values()

    @property
    def is_split(self) -> bool:
        """Whether there is more than one place, or one that is no device."""
        return self.uses_disk or len({_place(where) for where in self.asked.values()}) > 1

    @property
    def moves(self) -> bool:
        """Whether weights go to an accelerator after they were loaded on the CPU."""
        return self.execution_device != CPU and self.is_split

    def where(self, name: str) -> Where:
        """Say where the weight `name` lives; of several tied names the one that is nearest to where it computes."""
        places = [where for where in map(self._said, self._groups.get(name, (name,))) if where is not None]
        return min(places or [CPU], key=lambda where: (where == DISK, where == CPU))

    def on_disk(self, name: str) -> bool:
        """Say whether the parameter `name` stays on disk."""
        return self.where(name) == DISK

    def in_ram(self, name: str) -> bool:
        """Say whether the parameter `name` waits in memory for an accelerator that computes with it."""
        return self.execution_device != CPU and self.where(name) == CPU

    def device_of(self, name: str) -> torch.device:
        """Say which device computes with the weight, or the module, `name`."""
        where = self.where(name)
        return self.main_device if where in (DISK, CPU) else device_named(where)

    def true_map(self) -> dict[str, Any]:
        """Give the map with "disk" in it, modules that are tied to a weight in memory set right.

        What is on disk comes last: transformers' pipelines send inputs to the first place of a map. So a module that
        stays in memory anyway is named when all is mapped to disk.
        """
        result = dict(self.asked)
        for name in self._groups:
            said = self._said(name)
            if said is not None and said != self.where(name):
                result[name.rpartition(".")[0]] = self.where(name)
        if self.stays and set(result.values()) == {DISK}:
            result[self.stays] = self.execution_device
        return dict(sorted(result.items(), key=lambda entry: entry[1] == DISK))

    def _said(self, name: str) -> Where | None:
        while name and name not in self.asked:
            name = name.rpartition(".")[0]
        found = self.asked.get(name)
        return None if found is None else _normal(found)


def _uncovered(model: nn.Module, device_map: Collection[str], groups: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Name the modules with weights or buffers that no entry of the map covers, nor one of a tied name."""

    def covers(name: str) -> bool:
        return any(f"{name}.".startswith(f"{key}.") for key in device_map)

    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters, *module._buffers]
        names = [f"{path}.{leaf}" if path else leaf for leaf in own]
        if any(not any(covers(other) for other in groups.get(name, (name,))) for name in names):
            found.append(path)
    return found
