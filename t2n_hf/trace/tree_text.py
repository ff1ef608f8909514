"""Structures of pytrees as text: readable, compared by equality, and read back without running anything it names.

    tree_spec_as_name(spec, 3) == '___3_["builtins.dict",["x","y"],["*",["builtins.tuple",null,["*","*"]]]]'

A structure is `"*"` for a leaf, or [type, context, [structures]]. A context is JSON; what JSON lacks is an object with
one key: {"tuple": [...]}, {"dict": [[key, value], ...]}, {"dtype": "float32"}, {"device": "cpu"}, {"class": "a:b"}.
"""

import json
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from t2n_hf.errors import FormatError

__all__ = ["tree_spec_as_name", "tree_spec_from_name"]

_LEAF: Final = "*"
_NAME: Final = re.compile(r"___(\d+)_(.+)", re.DOTALL)
# What a defaultdict may make; a name in a text must not get anything else called.
_FACTORIES: Final = (list, dict, set, tuple, int, float, bool, str, OrderedDict, defaultdict, deque)


def tree_spec_as_name(tree_spec: pytree.TreeSpec, n_elements: int) -> str:
    """Write a structure as text.

    Args:
        tree_spec: what `tree_flatten` gave.
        n_elements: number of its leaves.

    Raises FormatError when `n_elements` is another number, or for a structure whose context has no text.
    """
    if n_elements != tree_spec.num_leaves:
        raise FormatError(f"the structure has {tree_spec.num_leaves} leaves, n_elements is {n_elements}")
    return f"___{n_elements}_{json.dumps(_node(tree_spec), separators=(',', ':'))}"


@lru_cache(maxsize=64)
def tree_spec_from_name(name: str) -> tuple[int, pytree.TreeSpec]:
    """Read what `tree_spec_as_name` wrote: the number of leaves, and the structure, equal to the one written.

    Raises FormatError for any other text, and for a type that is not registered with `torch.utils._pytree` here.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise FormatError(f"{name[:80]!r} is no structure; expected '___<number of leaves>_<structure>'")
    try:
        spec = _read_node(json.loads(match[2]))
    except (json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"the structure {name[:80]!r} cannot be read: {error}") from error
    if spec.num_leaves != int(match[1]):
        raise FormatError(f"the structure {name[:80]!r} has {spec.num_leaves} leaves, and says that it has {match[1]}")
    return spec.num_leaves, spec


def _node(spec: pytree.TreeSpec) -> Any:  # noqa: ANN401 - JSON
    if spec.type is None:
        return _LEAF
    return [_type_name(spec.type), _text_of(spec._context), [_node(child) for child in spec._children]]


def _type_name(kind: Any) -> str:  # noqa: ANN401 - a class, or the function `namedtuple`
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _text_of(context: Any) -> Any:  # noqa: ANN401 - JSON of anything that a pytree keeps
    if context is None or type(context) in (bool, int, float, str):
        return context
    if type(context) is list:
        return [_text_of(item) for item in context]
    if type(context) in (tuple, torch.Size):
        return {"tuple": [_text_of(item) for item in context]}
    if type(context) is dict:
        return {"dict": [[_text_of(key), _text_of(value)] for key, value in context.items()]}
    if isinstance(context, torch.dtype):
        return {"dtype": str(context).removeprefix("torch.")}
    if isinstance(context, torch.device):
        return {"device": str(context)}
    if isinstance(context, type) and _may_be_named(context):
        return {"class": _class_name(context)}
    raise FormatError(
        f"a structure holds a {type(context).__qualname__} ({context!r:.80}), which has no text; register its class "
        "with torch.utils._pytree so that its context is made of numbers, text, lists, tuples and dicts"
    )


def _read_node(node: Any) -> pytree.TreeSpec:  # noqa: ANN401 - JSON
    if node == _LEAF:
        return pytree.tree_structure(0)
    if not isinstance(node, list) or len(node) != 3 or not isinstance(node[0], str) or not isinstance(node[2], list):
        raise FormatError(f"{node!r:.80} is no structure; expected '*' or [type, context, [structures]]")
    name, context, children = node
    return pytree.TreeSpec(_registered(name), _read_context(context), [_read_node(child) for child in children])


def _registered(name: str) -> Any:  # noqa: ANN401 - a class, or the function `namedtuple`
    for kind in pytree.SUPPORTED_NODES:
        if _type_name(kind) == name:
            return kind
    raise FormatError(
        f"{name} is not registered with torch.utils._pytree in this process; import the module that defines it first"
    )


def _read_tuple(items: list[Any]) -> tuple[Any, ...]:
    return tuple(_read_context(item) for item in items)


def _read_dict(pairs: list[Any]) -> dict[Any, Any]:
    return {_read_context(key): _read_context(value) for key, value in pairs}


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"{name!r} is no dtype of torch")
    return dtype


def _read_class(name: str) -> type:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not _may_be_named(found):
        raise FormatError(f"{name!r} is no named tuple or container that is imported in this process")
    return found


def _may_be_named(kind: type) -> bool:
    return kind in _FACTORIES or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": _read_tuple,
    "dict": _read_dict,
    "dtype": _read_dtype,
    "device": torch.device,
    "class": _read_class,
}


def _read_context(text: Any) -> Any:  # noqa: ANN401 - JSON, and what a pytree keeps
    if isinstance(text, list):
        return [_read_context(item) for item in text]
    if not isinstance(text, dict):
        return text
    kind, value = next(iter(text.items()), ("", None))
    if len(text) != 1 or kind not in _READERS:
        raise FormatError(f"{text!r:.80} is no part of a structure; expected one of {', '.join(_READERS)}")
    try:
        return _READERS[kind](value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"{text!r:.80} is no {kind}: {error}") from error
