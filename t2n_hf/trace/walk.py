"""The parts and tensors of a model in torch's own order, by loops.

`nn.Module.modules()` and its like are generators inside generators, one for each level that a part lies below; an
export asks for all parts some twenty times, and that was a tenth of what a further layer costs.
"""

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["modules_of", "named_modules_of", "named_tensors_of"]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """What `module.modules()` gives: itself and all parts, each once, outer ones first."""
    found: dict[nn.Module, None] = {}

    def visit(part: nn.Module) -> None:
        found[part] = None
        for child in part._modules.values():
            if child is not None and child not in found:
                visit(child)

    visit(module)
    return list(found)


def named_modules_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `module.named_modules(remove_duplicate=False)` gives: a part that has two names is there twice."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, part: nn.Module) -> None:
        found.append((name, part))
        prefix = f"{name}." if name else ""
        for key, child in part._modules.items():
            if child is not None:
                visit(prefix + key, child)

    visit("", module)
    return found


def named_tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every buffer, under each of its names."""
    parts = named_modules_of(module)
    for kind in ("_parameters", "_buffers"):
        for name, part in parts:
            prefix = f"{name}." if name else ""
            for key, tensor in getattr(part, kind).items():
                if tensor is not None:
                    yield prefix + key, tensor
