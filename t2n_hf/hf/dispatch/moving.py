"""A model with weights in several places stays as it is: inputs go to what computes them, it itself is not moved."""

import threading
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, Final

import torch
from accelerate.utils import find_device, send_to_device
from torch import nn

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.hf.placement.device_map import CPU, DISK, Placement
from t2n_hf.tensor.offload import OffloadedTensor

__all__ = ["align_inputs", "hold_in_place", "let_go"]

_HELD: Final = ("to", "cuda", "cpu", "load_adapter")
_HOOKS: Final = "_t2n_input_hooks"


def hold_in_place(model: nn.Module) -> None:
    """Let `model.to(device)`, `cuda()` and `cpu()` refuse what would part weights on disk from their budget.

    Adapters that transformers loads go to the devices that compute, also those beside weights on disk.
    """
    for name, method in (("to", _to), ("cuda", _cuda), ("cpu", _cpu), ("load_adapter", _load_adapter)):
        if hasattr(type(model), name):
            model.__dict__[name] = MethodType(method, model)


def let_go(model: nn.Module) -> None:
    """Undo `hold_in_place` and `align_inputs`."""
    for name in _HELD:
        model.__dict__.pop(name, None)
    for handle in model.__dict__.pop(_HOOKS, ()):
        handle.remove()


def _to(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - whatever nn.Module.to takes
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is not None:
        _refuse_move(model, device)
    return type(model).to(model, *args, **kwargs)


def _cuda(model: nn.Module, device: Any = None) -> nn.Module:  # noqa: ANN401 - whatever nn.Module.cuda takes
    _refuse_move(model, torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda"))
    return model


def _cpu(model: nn.Module) -> nn.Module:
    _refuse_move(model, torch.device("cpu"))
    return model


def _load_adapter(model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as transformers has it
    """Load an adapter as transformers does, which by itself would offload, and lose, what the map has on disk."""
    told: Any = model.hf_device_map
    main = next((where for where in told.values() if where not in (DISK, CPU)), CPU)
    model.hf_device_map = {name: main if where in (DISK, CPU) else where for name, where in told.items()}  # type: ignore[assignment]
    try:
        return type(model).load_adapter(model, *args, **kwargs)  # type: ignore[attr-defined]
    finally:
        model.hf_device_map = told


def _refuse_move(model: nn.Module, device: torch.device) -> None:
    """Raise UnsupportedOpError when a weight computes elsewhere. With all of them there, there is nothing to move."""
    for name, weight in model.named_parameters():
        same = weight.device.type == device.type and device.index in (None, weight.device.index)
        if not same:
            kind = "is offloaded and computes" if isinstance(weight, OffloadedTensor) else "is"
            raise UnsupportedOpError(
                f"the model has weights on disk or in several places and cannot be moved to {device}: {name} {kind} on "
                f"{weight.device}; load it again with another device_map, or materialize(model) first"
            )


def align_inputs(
    model: nn.Module, placement: Placement, skip_keys: str | Iterable[str] | None = None, force: bool = False
) -> None:
    """Send the inputs of each module to the device that computes it, and what the model returns to its inputs' device.

    Keyword arguments named in `skip_keys` stay where they are. With the CPU alone nothing is done unless `force`.
    """
    if placement.execution_device == CPU and not force:
        return
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    came_from: dict[int, list[torch.device | None]] = {}

    def send(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:  # noqa: ANN401
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=skipped)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        came_from.setdefault(threading.get_ident(), []).append(find_device([args, kwargs]))
        return send(module, args, kwargs, placement.device_of(""))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        devices = came_from.get(threading.get_ident())
        device = devices.pop() if devices else None
        return output if device is None or output is None else send_to_device(output, device, skip_keys=skipped)

    handles = [
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    for path, module in model.named_modules():
        if path and _is_device_of_its_own(path, module, placement.asked):
            device = placement.device_of(path)

            def hook(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device = device
            ) -> Any:  # noqa: ANN401
                return send(module, args, kwargs, device)

            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    model.__dict__[_HOOKS] = handles


def _is_device_of_its_own(path: str, module: nn.Module, device_map: Mapping[str, Any]) -> bool:
    return path in device_map or any(p is not None for p in module._parameters.values())
