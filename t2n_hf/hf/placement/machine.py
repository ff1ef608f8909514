"""What the machine has: memory and free disk space, and which devices."""

import os
import tempfile
from pathlib import Path
from typing import Final

import psutil
import torch

from t2n_hf.errors import ConfigError, StorageError

__all__ = ["device_named", "free_disk_nbytes", "memory_nbytes", "reachable_memory_nbytes"]

_GROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def _group_limit() -> int | None:
    for file in _GROUP_LIMITS:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def memory_nbytes() -> int:
    """Bytes of memory that are free now, or could be at once."""
    available = int(psutil.virtual_memory().available)
    limit = _group_limit()
    return available if limit is None else min(available, limit)


def reachable_memory_nbytes() -> int:
    """Bytes that a process could hold at most: memory and swap space, within the limit of its control group."""
    whole = int(psutil.virtual_memory().total) + int(psutil.swap_memory().total)
    limit = _group_limit()
    return whole if limit is None else min(whole, limit)


def free_disk_nbytes(folder: str | Path | None) -> int:
    """Bytes that can be written in `folder` (None: the system's for temporary files); it need not exist yet.

    Raises StorageError when nothing can be found out.
    """
    path = Path(tempfile.gettempdir() if folder is None else folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path) if hasattr(os, "statvfs") else None
        return psutil.disk_usage(str(path)).free if found is None else found.f_bavail * found.f_frsize
    except OSError as error:
        raise StorageError(error.errno, f"cannot tell the free space of {path}: {error.strerror}") from error


def device_named(where: str | int | torch.device) -> torch.device:
    """Give the device that a map means: a number is an accelerator. Raises ConfigError for one that is not there."""
    if isinstance(where, torch.device) and where.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        if isinstance(where, int):
            device = None if accelerator is None else torch.device(accelerator.type, where)
        else:
            device = torch.device(where)
    except RuntimeError as error:
        raise ConfigError(f'{where!r} is no device; expected "cpu", "disk", or an accelerator ("cuda:0", 0)') from error
    if device is None or (
        device.type not in ("cpu", "meta") and (accelerator is None or accelerator.type != device.type)
    ):
        there = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise ConfigError(f'the device map names {where!r}, and this machine has {there}; map to "cpu" or "disk"')
    if device.type in ("cpu", "meta"):
        return device
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise ConfigError(
            f"the device map names {where!r}, and this machine has {torch.accelerator.device_count()} of them"
        )
    return torch.device(device.type, index)
