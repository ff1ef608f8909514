"""The parts and tensors of a model in torch's own order, by loops.

`nn.Module.modules()` and its like are generators inside generators, one for each level that a part lies below; an
export asks for all parts some twenty times, and that was a tenth of what a further layer costs.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import nn

__all__ = [
    "are_the_same",
    "attribute_of",
    "modules_of",
    "named_modules_of",
    "named_parameters_of",
    "named_tensors_of",
    "names_of",
    "own_attributes",
    "parts_known",
    "tensors_in",
]

# What every module has: bookkeeping of torch, not a property of the module.
_BOOKKEEPING: Final = frozenset(vars(nn.Module()))
_KNOWN: ContextVar[tuple[nn.Module, list[nn.Module]] | None] = ContextVar("t2n_hf_parts_known", default=None)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """What `module.modules()` gives: itself and all parts, each once, outer ones first."""
    known = _KNOWN.get()
    if known is not None and known[0] is module:
        return known[1]
    found: dict[nn.Module, None] = {}

    def visit(part: nn.Module) -> None:
        found[part] = None
        for child in part._modules.values():
            if child is None or child in found:
                continue
            if child._modules:
                visit(child)
            else:  # most parts have none, and a call takes longer than all else
                found[child] = None

    visit(module)
    return list(found)


@contextmanager
def parts_known(module: nn.Module) -> Iterator[None]:
    """Let `modules_of(module)` not look again in the block, in which no part is put in the place of another."""
    token = _KNOWN.set((module, modules_of(module)))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def own_attributes(module: nn.Module) -> frozenset[str]:
    """Names of the attributes that a module itself has, without torch's bookkeeping."""
    return _without_bookkeeping(tuple(vars(module)))


@lru_cache(maxsize=1024)
def _without_bookkeeping(names: tuple[str, ...]) -> frozenset[str]:
    """By the names: parts of a class have the same ones, and are asked for them again and again."""
    return frozenset(names) - _BOOKKEEPING


def are_the_same(own: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether attributes are those of `before`: the same objects, under the same names, in the same order."""
    return list(own) == list(before) and all(map(operator.is_, own.values(), before.values()))


def names_of(module: nn.Module) -> dict[nn.Module, str]:
    """What `module.named_modules()` gives, parts before names: each part once, under its first name."""
    found: dict[nn.Module, str] = {}

    def visit(name: str, part: nn.Module) -> None:
        found[part] = name
        prefix = f"{name}." if name else ""
        for key, child in part._modules.items():
            if child is None or child in found:
                continue
            if child._modules:
                visit(prefix + key, child)
            else:
                found[child] = prefix + key

    visit("", module)
    return found


def attribute_of(module: nn.Module, name: str) -> Any:  # noqa: ANN401 - any attribute
    """What `getattr(module, name, None)` gives.

    Torch looks in vain for an attribute in many places, and words an error; most parts lack what is asked of all.
    """
    own = vars(module)
    if name in own:
        return own[name]
    if name in own["_modules"] or name in own["_parameters"] or name in own["_buffers"]:
        return getattr(module, name, None)
    return getattr(module, name, None) if _class_may_have(type(module), name) else None  # type: ignore[arg-type]


@cache
def _class_may_have(kind: type[nn.Module], name: str) -> bool:
    return hasattr(kind, name) or kind.__getattr__ is not nn.Module.__getattr__


def named_modules_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `module.named_modules(remove_duplicate=False)` gives: a part that has two names is there twice."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, part: nn.Module) -> None:
        found.append((name, part))
        prefix = f"{name}." if name else ""
        for key, child in part._modules.items():
            if child is None:
                continue
            if child._modules:
                visit(prefix + key, child)
            else:
                found.append((prefix + key, child))

    visit("", module)
    return found


def named_tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every buffer, under each of its names."""
    return tensors_in(named_modules_of(module))


def tensors_in(parts: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """`named_tensors_of` a module whose parts are known, by `named_modules_of`."""
    yield from _tensors_in(parts, "_parameters")
    yield from _tensors_in(parts, "_buffers")


def named_parameters_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What `module.named_parameters(remove_duplicate=False)` gives: every parameter, under each of its names."""
    return _tensors_in(named_modules_of(module), "_parameters")


def _tensors_in(parts: list[tuple[str, nn.Module]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in parts:
        tensors = vars(part)[kind]
        if tensors:
            prefix = f"{name}." if name else ""
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + key, tensor
