"""Where a parameter lives. What a device map sends to "disk" is kept from transformers and accelerate.

Their own disk offload throws quantized results away, resaves what it cannot index, and leaves parameters on meta. So
they are shown a map in which "disk" is the device that computes, and what was asked for is remembered here.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

__all__ = ["DISK", "Placement"]

DISK: Final = "disk"
_CPU: Final = "cpu"
Where = str | int | torch.device


class Placement:
    """The device map that the user meant: with "disk", and with tied weights in one place.

    A map may come twice: the user's own (a dict), and the one that "auto" was resolved to.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Where] = {}
        self.max_memory: dict[str | int, int] = {}
        self._groups: Mapping[str, tuple[str, ...]] = {}

    def take(self, device_map: Mapping[str, Where]) -> dict[str, Any]:
        """Remember `device_map`; return the map to show to transformers, without "disk". Changes nothing in place."""
        self.asked = dict(device_map)
        computes = self.execution_device
        return {name: computes if where == DISK else where for name, where in device_map.items()}

    def tie(self, groups: Mapping[str, tuple[str, ...]]) -> None:
        """Say which names are one weight. It is on disk only when all of its names are."""
        self._groups = groups

    @property
    def execution_device(self) -> Where:
        """Where weights on disk are computed with: the first accelerator in the map, else the CPU."""
        devices = [where for where in self.asked.values() if str(where) not in (DISK, _CPU)]
        return devices[0] if devices else _CPU

    @property
    def uses_disk(self) -> bool:
        """Whether anything is mapped to disk."""
        return DISK in self.asked.values()

    def on_disk(self, name: str) -> bool:
        """Say whether the parameter `name` stays on disk."""
        return self.uses_disk and all(self._mapped_to_disk(other) for other in self._groups.get(name, (name,)))

    def _mapped_to_disk(self, name: str) -> bool:
        return self._where(name) == DISK

    def true_map(self) -> dict[str, Any]:
        """Give the map with "disk" in it, modules that are tied to a weight in memory set right."""
        result = dict(self.asked)
        for name, group in self._groups.items():
            module = name.rpartition(".")[0]
            if self._mapped_to_disk(name) and not self.on_disk(name):
                other = next(o for o in group if not self._mapped_to_disk(o))
                result[module] = self._where(other)
        return result

    def _where(self, name: str) -> Where:
        while name and name not in self.asked:
            name = name.rpartition(".")[0]
        return self.asked.get(name, _CPU)
