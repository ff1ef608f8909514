"""Caches of transformers as pytrees: their tensors are leaves, everything else that they remember is their structure.

All kinds of caches and of cache layers are taken apart in one way: attribute by attribute, into lists and dicts and
the layers in them. So a cache that is put together again is in the same state, also a static one, one with windows, or
one with states of linear attention, and structures are equal exactly when the caches differ in tensors only.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
)

from t2n_hf.errors import ConfigError, FormatError

__all__ = ["register_cache_trees"]

_OBJECTS: Final = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer)
_PLAIN: Final = (bool, int, float, str, torch.SymInt, torch.dtype, torch.device)


def register_cache_trees() -> None:
    """Register every cache class that is defined by now with `torch.utils._pytree`; those that are already stay.

    Called when `t2n_hf` is imported, and again by whoever meets a model whose module defines a cache of its own.
    """
    for kind in _subclasses(Cache):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _flatten,
                _unflatten,
                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                flatten_with_keys_fn=_flatten_with_keys,
            )


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield from _subclasses(child)


def _flatten(cache: Cache) -> tuple[list[torch.Tensor], Any]:
    tensors: list[torch.Tensor] = []
    return tensors, _take_apart(cache, tensors, type(cache).__qualname__)


def _flatten_with_keys(cache: Cache) -> tuple[list[tuple[Any, torch.Tensor]], Any]:
    tensors, context = _flatten(cache)
    return [(pytree.SequenceKey(place), tensor) for place, tensor in enumerate(tensors)], context


def _unflatten(leaves: Iterable[Any], context: Any) -> Any:  # noqa: ANN401 - a cache
    return _put_together(context, iter(leaves))


# A context is made of ["leaf"], ["value", x], ["class", name], ["list", [...]], ["tuple", [...]], ["dict", {...}] and
# ["object", name of the class, {attribute: ...}].


def _take_apart(value: Any, tensors: list[torch.Tensor], where: str) -> list[Any]:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["leaf"]
    if value is None or isinstance(value, _PLAIN):
        return ["value", value]
    if isinstance(value, type) and issubclass(value, _OBJECTS):
        return ["class", _name(value)]
    if type(value) in (list, tuple):
        parts = [_take_apart(item, tensors, f"{where}[{place}]") for place, item in enumerate(value)]
        return [type(value).__name__, parts]
    if type(value) is dict:
        return ["dict", {key: _take_apart(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}]
    if isinstance(value, _OBJECTS):
        attributes = vars(value).items()
        return ["object", _name(type(value)), {k: _take_apart(v, tensors, f"{where}.{k}") for k, v in attributes}]
    raise ConfigError(
        f"{where} is a {type(value).__qualname__}, which cannot be a part of a cache that is passed as a pytree; "
        "use a cache without offloading, made of tensors, numbers, lists and dicts"
    )


def _put_together(part: list[Any], leaves: Iterator[Any]) -> Any:  # noqa: ANN401 - any part of a cache
    kind, *what = part
    if kind == "leaf":
        return next(leaves)
    if kind == "value":
        return what[0]
    if kind == "class":
        return _class(what[0])
    if kind == "dict":
        return {key: _put_together(item, leaves) for key, item in what[0].items()}
    if kind == "object":
        made: Any = object.__new__(_class(what[0]))
        vars(made).update({key: _put_together(item, leaves) for key, item in what[1].items()})
        return made
    items = [_put_together(item, leaves) for item in what[0]]
    return tuple(items) if kind == "tuple" else items


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    """A class of caches by its name, among those that this process has imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    if not (isinstance(found, type) and issubclass(found, _OBJECTS)):
        raise FormatError(f"{name!r} is no cache, nor a layer of one, that is imported in this process")
    return found
