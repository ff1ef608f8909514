"""`torch.autocast` in a model: refused where it would have an effect, with the operator, the module and the line."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from typing import Any

import torch
from torch import fx

from t2n_hf.errors import CaptureError
from t2n_hf.places import module_of, source_line

__all__ = ["AutomaticTypesError", "automatic_types_error", "device_of_automatic_types", "refuse_automatic_types"]


class AutomaticTypesError(CaptureError):
    """An operator would choose its type by itself; no other way to capture the model helps."""


def refuse_automatic_types(func: Any, args: Any, kwargs: Any, tracer: Any) -> None:
    """Raise AutomaticTypesError when an operator with these arguments is called in a block of automatic types."""
    device = device_of_automatic_types(args, kwargs)
    if device is not None:
        raise automatic_types_error(func, device, tracer)


def device_of_automatic_types(args: Any, kwargs: Any) -> str | None:
    """The device for which automatic types hold for a call with these arguments; None where none do.

    A block that is disabled, or that is for another device than that of the tensors, does nothing and is none.
    """
    if not torch._C._is_any_autocast_enabled():
        return None
    found: list[torch.Tensor] = []
    fx.node.map_aggregate((args, kwargs), lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else leaf)
    return next((one.device.type for one in found if torch.is_autocast_enabled(one.device.type)), None)


def automatic_types_error(func: Any, device: str, tracer: Any) -> AutomaticTypesError:
    """The error that names an operator in a block of automatic types, and where it is called."""
    # The tracer knows the place for a node that it makes.
    node = tracer.create_node("call_function", func, (), {})
    where = module_of(node).removeprefix("_export_root.").removeprefix("module.").rstrip(".")
    return AutomaticTypesError(
        f"{func} in {where or 'the model'} is called in torch.autocast({device!r}), which lets it compute in "
        f"{torch.get_autocast_dtype(device)}; an archive computes in the type that it is exported in. "
        f"At {source_line(node) or 'an unknown line'}. Leave autocast out for the export, or give it enabled=False"
    )
