"""Device maps for any module: accelerate's two entry points, with weights that are quantized, offloaded or on disk."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from accelerate.utils import get_max_memory
from torch import nn

from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import QUANT_METHOD, T2NConfig
from t2n_hf.hf.dispatch.module_load import ModuleLoad
from t2n_hf.hf.dispatch.moving import align_inputs, hold_in_place, let_go
from t2n_hf.hf.dispatch.options import (
    config_for,
    dtype_named,
    limits_of,
    open_checkpoint,
    ranges_of,
    refuse_without_meaning,
)
from t2n_hf.hf.hooks import attach_pools, leases_of, offloaded_parameters
from t2n_hf.hf.placement.device_map import PLANNED_MAPS, Placement, Where, check_names, checked_map
from t2n_hf.hf.placement.infer import balanced, infer_map
from t2n_hf.hf.placement.preflight import PlacementReport, preflight
from t2n_hf.hf.quantizer import T2NQuantizer
from t2n_hf.hf.report import coverage_of
from t2n_hf.hf.saving import adopt

__all__ = [
    "DeviceMap",
    "dispatch_model",
    "load_checkpoint_and_dispatch",
    "plan_load",
]

Model = TypeVar("Model", bound=nn.Module)
DeviceMap = str | int | torch.device | Mapping[str, Where]


def load_checkpoint_and_dispatch(  # noqa: PLR0917 - the signature that code written for accelerate calls
    model: Model,
    checkpoint: str | Path,
    device_map: DeviceMap | None = None,
    max_memory: Mapping[Where, int | str] | None = None,
    no_split_module_classes: Iterable[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Iterable[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    quantization_config: T2NConfig | None = None,
) -> Model:
    """Load a checkpoint into any module, each weight straight to where `device_map` sends it; return the module.

    Arguments are those of accelerate's function of this name, and mean the same. What differs: weights on disk stay in
    the checkpoint's own file and take turns in memory within a budget; they can be quantized on the way; a weight that
    is used without calling its module is right as well; nothing of the module changes when the load fails. Weights that
    are quantized or on disk come without gradients; `requires_grad_(True)` afterwards trains plain ones on disk too.

    Args:
        model: the module, with or without values (`accelerate.init_empty_weights()`). Its weights are looked for under
            their own names; tied ones need one of their names only.
        checkpoint: a `.safetensors` file, an index of shards (`.index.json`), or a folder with either. A folder that
            save_pretrained wrote of a quantized model is loaded packed. `.bin` files are refused: reading them runs
            the code in them; convert them first.
        device_map: module names to devices, "cpu" or "disk"; "auto", "balanced", "balanced_low_0" or "sequential" to
            have one made; one device for all. None: the weights stay on the devices where the module has them (the CPU
            if it has no values), and nothing is hooked.
        max_memory: bytes by device, numbers or text ("2GB"). With a map that is made, what it is made of; with a given
            one, what the device must not exceed. None: what is free now, without any limit for a given map.
        no_split_module_classes: class names of modules that stay on one accelerator; None: what a model of transformers
            says of itself.
        offload_folder: folder of the private file for weights that the checkpoint does not hold as they are needed
            (quantized ones); `spill_dir` of the config if that is given. None: the system's for temporary files.
        offload_buffers: must be False: buffers stay in memory.
        dtype: what float weights become; None: what the module has them in.
        offload_state_dict: not needed: no more than one weight is in memory before it is in its place.
        skip_keys: keyword arguments that are not moved to a module's device.
        preload_module_classes: not needed: weights that are used without calling their module are served as well.
        force_hooks: hook the inputs also when one device computes everything.
        strict: raise FormatError when checkpoint and module have not the same names. Otherwise what only the checkpoint
            has is warned about, and what only the module has keeps its values.
        full_state_dict: must be True.
        broadcast_from_rank0: must be False.
        quantization_config: what to quantize on the way; its machine options (budget, folder, length) hold as well.

    Raises BudgetError before loading when the map cannot fit (it names the module, the weight and the least that
    works), CheckpointNotFoundError without safetensors weights, FormatError for shapes that differ and for weights
    without values, StorageError, QuantizationError and ConfigError.
    """
    refuse_without_meaning(offload_buffers, full_state_dict, broadcast_from_rank0)
    index, forms, stored = open_checkpoint(checkpoint)
    config = config_for(quantization_config, stored, offload_folder)
    load = ModuleLoad(
        model=model,
        config=config,
        placement=Placement(),
        index=index,
        dtype=dtype_named(dtype),
        forms=forms,
    )
    _refuse_dispatched(model)
    load.check_names(strict, checkpoint)
    limits = limits_of(max_memory)
    report = plan_load(load, device_map, limits, no_split_module_classes)
    carry_out(load, report, skip_keys, force_hooks)
    return model


def dispatch_model(  # noqa: PLR0917 - the signature that code written for accelerate calls
    model: Model,
    device_map: DeviceMap,
    main_device: Where | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Iterable[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    *,
    max_memory: Mapping[Where, int | str] | None = None,
    no_split_module_classes: Iterable[str] | None = None,
    quantization_config: T2NConfig | None = None,
) -> Model:
    """Send the weights that a module has to where `device_map` says, and hook it so that it runs; return the module.

    Arguments are those of accelerate's function of this name, and mean the same; see `load_checkpoint_and_dispatch` for
    those that both have, and for `device_map` given as a word.

    Args:
        model: the module.
        device_map: where each module goes; every weight has to be covered.
        main_device: what computes offloaded weights; None: the first accelerator in the map, else the CPU.
        state_dict: values for weights that the module has on the meta device.
        offload_dir: folder of the private file that weights on disk are written to; None: the system's for temporary
            files.
        offload_index: where weights are on disk already: name to {"safetensors_file": path, "weight_name": name}. Those
            are read from there and not written.
        offload_buffers: must be False.
        skip_keys: as above.
        preload_module_classes: not needed.
        force_hooks: as above.
        max_memory: bytes by device.
        no_split_module_classes: as above.
        quantization_config: what to quantize on the way.

    Raises as `load_checkpoint_and_dispatch` does, and ConfigError for a map that leaves weights out.
    """
    refuse_without_meaning(offload_buffers)
    _refuse_dispatched(model)
    load = ModuleLoad(
        model=model,
        config=config_for(quantization_config, None, offload_dir),
        placement=Placement(),
        index=None if offload_index is None else ranges_of(offload_index),
        given=dict(state_dict or {}),
    )
    load.placement.main = main_device
    load.refuse_empty("state_dict" if state_dict else "the module")
    report = plan_load(load, device_map, limits_of(max_memory), no_split_module_classes)
    carry_out(load, report, skip_keys, force_hooks)
    return model


def _refuse_dispatched(model: nn.Module) -> None:
    if leases_of(model) is not None or hasattr(model, "hf_device_map"):
        raise ConfigError(
            f"this {type(model).__name__} has a device map already; materialize(model) first, or load it anew"
        )
    inner = next((path for path, module in model.named_modules() if leases_of(module) is not None), None)
    if inner is not None:
        raise ConfigError(
            f"{inner} of this {type(model).__name__} has a device map already; materialize that module first, or "
            "dispatch the others one by one"
        )


def plan_load(
    load: ModuleLoad,
    device_map: DeviceMap | None,
    limits: dict[Where, int] | None,
    no_split: Iterable[str] | None = None,
) -> PlacementReport | None:
    """Settle the map, and refuse what cannot fit. None without a map."""
    if device_map is None:
        return None
    needs, placement = load.needs(), load.placement
    no_split = set(no_split or getattr(load.model, "_no_split_modules", None) or ())
    if isinstance(device_map, str) and device_map in PLANNED_MAPS:
        placement.limits = limits or {device: int(limit) for device, limit in get_max_memory().items()}
        if device_map != "sequential":
            placement.limits = balanced(load.model, needs, placement.limits, no_split, device_map)
        device_map = infer_map(
            load.model,
            needs,
            placement.limits,
            no_split=no_split,
            readahead_nbytes=load.config.readahead_bytes,
        )
    else:
        placement.limits = limits or {}
        device_map = checked_map(device_map if isinstance(device_map, Mapping) else {"": device_map})
        check_names(load.model, device_map)
    placement.take(device_map)
    placement.complete(load.model)
    return preflight(
        needs,
        placement,
        max_resident_bytes=load.config.max_resident_bytes,
        spill_dir=load.config.spill_dir,
    )


def carry_out(
    load: ModuleLoad, report: PlacementReport | None, skip_keys: str | Iterable[str] | None, force_hooks: bool
) -> None:
    """Load, and change the module: all of it, or nothing."""
    model = load.model
    undo = load.install(load.placed())
    try:
        if report is not None:
            model.hf_device_map = load.placement.true_map()  # type: ignore[assignment]
            if offloaded_parameters(model):
                ahead = report.readahead(load.config.readahead_bytes)
                attach_pools(model, report.budgets, readahead_nbytes=ahead)
            align_inputs(model, load.placement, skip_keys, force_hooks)
            if offloaded_parameters(model) or load.placement.moves:
                hold_in_place(model)
        _adopt(load, report)
    except BaseException:
        for store, leaf, old in undo:
            store[leaf] = old
        leases = leases_of(model)
        if leases is not None:
            leases.detach(model)
        let_go(model)
        model.__dict__.pop("hf_device_map", None)
        raise


def _adopt(load: ModuleLoad, report: PlacementReport | None) -> None:
    """Give the module what one from from_pretrained has: a report, and for a model of transformers its quantizer."""
    model: Any = load.model
    if not hasattr(model, "save_pretrained"):
        plan, errors = load.placing.plan, load.placing.errors

        def t2n_report(self: nn.Module) -> Any:  # noqa: ANN401 - a CoverageReport
            return coverage_of(self, plan, errors)

        model.t2n_report = MethodType(t2n_report, model)
        return
    quantizer = T2NQuantizer(load.config, pre_quantized=bool(load.forms))
    quantizer.plan, quantizer.placement = load.placing.plan, report
    quantizer.relative_errors = load.placing.errors
    quantizer.source_files = load.files
    model.hf_quantizer = quantizer
    model.is_quantized, model.quantization_method = True, QUANT_METHOD
    model.config.quantization_config = quantizer.quantization_config
    adopt(model)
