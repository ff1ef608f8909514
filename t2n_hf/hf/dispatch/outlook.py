"""What a load would take, asked before it: from a checkpoint's headers and an empty model, or from any module."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.accelerate import get_balanced_memory, get_max_memory

from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.dispatch.entry import DeviceMap, plan_load
from t2n_hf.hf.dispatch.module_load import ModuleLoad
from t2n_hf.hf.dispatch.options import config_for, limits_of, open_checkpoint
from t2n_hf.hf.loading import checkpoint_folder, empty_model
from t2n_hf.hf.placement.device_map import PLANNED_MAPS, Placement, Where, checked_map
from t2n_hf.hf.placement.preflight import PlacementReport
from t2n_hf.hf.quantizer import T2NQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["plan_placement"]


def plan_placement(
    model_or_path: nn.Module | str | Path,
    quantization_config: T2NConfig | None = None,
    device_map: DeviceMap = "auto",
    max_memory: Mapping[Where, int | str] | None = None,
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    task: str | None = None,
    **options: Any,  # noqa: ANN401 - revision, trust_remote_code: as for from_pretrained
) -> PlacementReport:
    """Say what will sit where, and the memory and disk that it takes, before anything is loaded.

    `print(plan_placement("folder", T2NConfig(), max_memory={"cpu": "1GB"}))` shows a table.

    Args:
        model_or_path: a model folder (or a repository of the Hub that was downloaded), of which the config and the
            headers of the weights are read; or any module, whose own weights are planned for.
        quantization_config: as for from_pretrained; None: nothing is quantized, or as the checkpoint is.
        device_map: as for from_pretrained, and "disk".
        max_memory: bytes by device, numbers or text; with a given map, limits that are checked.
        max_length: tokens whose keys and values get room; None: what the config says.
        batch_size: sequences at once; None: what the config says.
        dtype: what float weights act as; None: what the checkpoint has.
        task: which head a folder is loaded with, one of hf.tasks.TASKS; None: the class that its config names.
        **options: handed to the reading of the config.

    Raises BudgetError when it cannot fit, naming the module, the weight and the least that works; StorageError when
    the disk has no room for what would be written.
    """
    config = config_for(quantization_config, None, None)
    for name, value in (("max_length", max_length), ("batch_size", batch_size)):
        if value is not None:
            setattr(config, name, value)
    config.post_init()
    limits = limits_of(max_memory)
    if isinstance(model_or_path, nn.Module):
        load = ModuleLoad(model=model_or_path, config=config, placement=Placement(), dtype=dtype)
        report = plan_load(load, device_map, limits)
        assert report is not None
        return report
    folder = checkpoint_folder(model_or_path, **{k: v for k, v in options.items() if k in ("revision", "token")})
    index, _, stored = open_checkpoint(folder)
    if stored is not None:
        config = config_for(config if quantization_config else None, stored, None)
    model, dtype = empty_model(folder, task, dtype, options)
    quantizer = T2NQuantizer(config, pre_quantized=stored is not None)
    quantizer.update_dtype(dtype)
    return _planned(quantizer, model, [str(file.path) for file in index.files], device_map, limits)


def _planned(
    quantizer: T2NQuantizer,
    model: "PreTrainedModel",
    files: list[str],
    device_map: DeviceMap,
    limits: dict[Where, int] | None,
) -> PlacementReport:
    """Ask the quantizer what transformers asks it while it loads."""
    if isinstance(device_map, str) and device_map in PLANNED_MAPS:
        quantizer.preprocess_model(model, device_map=device_map, checkpoint_files=files)
        memory: Any = limits
        if device_map != "sequential":
            no_split = set(model._no_split_modules or ())
            memory = get_balanced_memory(model, memory, no_split, quantizer, low_zero=device_map == "balanced_low_0")
        else:
            memory = get_max_memory(memory)
        quantizer.adjust_max_memory(memory)
        quantizer.validate_environment(device_map={"": "cpu"})
    else:
        quantizer.quantization_config.limits = limits
        shown = quantizer.update_device_map(
            checked_map(device_map if isinstance(device_map, Mapping) else {"": device_map})
        )
        quantizer.preprocess_model(model, device_map=shown, checkpoint_files=files)
    if quantizer.placement is None:
        raise ConfigError(f"device_map={device_map!r} places nothing")
    return quantizer.placement
