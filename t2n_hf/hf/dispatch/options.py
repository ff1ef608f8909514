"""What the arguments of a dispatch mean: the checkpoint that is named, options, limits, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import convert_file_size_to_int

from t2n_hf.errors import CheckpointNotFoundError, ConfigError, FormatError
from t2n_hf.hf.config import NOT_QUANTIZED, QUANT_METHOD, T2NConfig
from t2n_hf.hf.placement.device_map import CPU, DISK, Where, checked_map
from t2n_hf.hf.stored import StoredForms
from t2n_hf.store.checkpoint import ByteRange, CheckpointFile, CheckpointIndex

__all__ = ["config_for", "dtype_named", "limits_of", "open_checkpoint", "ranges_of", "refuse_without_meaning"]

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(path: str | Path) -> tuple[CheckpointIndex, StoredForms, Mapping[str, Any] | None]:
    """Open safetensors weights and what a config.json beside them says of packed ones: (index, forms, its options).

    Raises CheckpointNotFoundError when there are none, or pickled ones only.
    """
    path = Path(path)
    if path.suffix in _PICKLES or path.name.endswith(tuple(f"{suffix}.index.json" for suffix in _PICKLES)):
        raise CheckpointNotFoundError(
            f"{path} is pickled: reading it could run code in it, and is not done. Convert it once, "
            "`safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')`, or load it with "
            "transformers and save_pretrained()"
        )
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} does not exist; expected a .safetensors file, an index, or a folder")
    index = CheckpointIndex.open(path)
    config_file = (path if path.is_dir() else path.parent) / "config.json"
    if not config_file.is_file():
        return index, StoredForms({}), None
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        stored = config.get("quantization_config")
    except (AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FormatError(f"{config_file} is no JSON object: {error}") from error
    if stored is None:
        return index, StoredForms({}), None
    if not isinstance(stored, dict) or stored.get("quant_method") != QUANT_METHOD:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        raise ConfigError(f"{path} is quantized with {method!r}, which t2n_hf does not load; take the plain weights")
    return index, StoredForms.from_json(stored.get("tensors")), stored


def refuse_without_meaning(
    offload_buffers: bool, full_state_dict: bool = True, broadcast_from_rank0: bool = False
) -> None:
    """Raise ConfigError for arguments of accelerate that ask for what is not done here."""
    for wrong, said, why in (
        (offload_buffers, "offload_buffers=True", "buffers stay in memory: they are small, and modules write to them"),
        (not full_state_dict, "full_state_dict=False", "there are no sharded state dicts here"),
        (broadcast_from_rank0, "broadcast_from_rank0=True", "each process reads the file itself"),
    ):
        if wrong:
            raise ConfigError(f"{said} has no meaning here ({why}); leave it out")


def config_for(given: T2NConfig | None, stored: Mapping[str, Any] | None, folder: str | Path | None) -> T2NConfig:
    """Join the options of a call with those of a packed checkpoint, which say what the weights are."""
    config: Any = T2NConfig(NOT_QUANTIZED) if given is None else T2NConfig(**_options(given))
    if stored is not None:
        machine = config.get_loading_attributes()
        config = T2NConfig.from_dict(stored)
        for name, value in machine.items():
            if name != "requested" and (given is not None or name != "compute"):
                setattr(config, name, value)
    if config.spill_dir is None and folder is not None:
        config.spill_dir = str(folder)
    checked: T2NConfig = config
    return checked


def _options(config: T2NConfig) -> dict[str, Any]:
    return {name: value for name, value in config if name not in ("quant_method", "tensors")}


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Read a dtype or its name. Raises ConfigError."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r}; expected a torch.dtype or its name")
    return found


def limits_of(max_memory: Mapping[Where, int | str] | None) -> dict[Where, int] | None:
    """Read limits, accelerators first. Raises ConfigError."""
    if max_memory is None:
        return None
    if not isinstance(max_memory, Mapping):
        raise ConfigError(f"max_memory={max_memory!r}; expected bytes by device, such as {{'cpu': '2GB'}}")
    limits: dict[Where, int] = {}
    for device, limit in max_memory.items():
        try:
            limits[device] = convert_file_size_to_int(limit)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"max_memory[{device!r}]={limit!r}; expected bytes, or text such as '2GB'") from error
        if device != DISK:
            checked_map({"": device})
    return dict(sorted(limits.items(), key=lambda entry: (entry[0] == DISK, entry[0] == CPU, str(entry[0]))))


def ranges_of(offload_index: Mapping[str, Mapping[str, str]]) -> dict[str, ByteRange]:
    """Open what an index of accelerate names. Raises ConfigError for `.dat` files, FormatError, StorageError."""
    files: dict[str, CheckpointFile] = {}
    ranges: dict[str, ByteRange] = {}
    for name, entry in offload_index.items():
        path = entry.get("safetensors_file")
        if path is None:
            raise ConfigError(
                f"offload_index says that {name} is in a .dat file, which is not read; leave the index out: weights on "
                "disk are then written to offload_dir"
            )
        file = files.setdefault(path, CheckpointFile(path))
        key = entry.get("weight_name", name)
        if key not in file:
            raise FormatError(f"{path} does not hold {key!r}, though offload_index says so of {name}")
        ranges[name] = file.byte_range(key)
    return ranges
