"""Calls of a piece of a model with flat lists of tensors, and the way back: what a custom operator can be given.

A call `f(*args, **kwargs)` is told in two parts: a flat list of leaves (`serialize_args`), and one text for each
argument that says what the leaves were (`type_as_str_with_info`). `deserialize_args` and `deserialize_args_kwargs` put
the call together again from both. Leaves are tensors, and None, bool, int, float, text, dtypes and devices, which
travel in the list as they are. Everything else must be registered with `torch.utils._pytree`; models' outputs are by
transformers, and its caches by `t2n_hf.hf.caches.trees`.

    types = [type_as_str_with_info(arg) for arg in args]
    leaves, _ = serialize_args(args, None, schema="")
    assert deserialize_args(leaves, types) equals args

Names and parameters are those of experimental_experiment's module of this name. What differs: structures are text that
names types, not pickled; every container of leaves round-trips, not lists of tensors only; a call that does not fit
raises FormatError.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.trace.tree_text import tree_spec_as_name, tree_spec_from_name

__all__ = [
    "choose_kwargs_for_dynamic_shapes",
    "deserialize_args",
    "deserialize_args_kwargs",
    "extract_names_from_schema",
    "kind_and_leaves",
    "make_copy",
    "serialize_args",
    "serialize_one",
    "type_as_str_with_info",
]

# Names of leaves. A bool is an int for Python, so that it comes first.
_LEAVES: Final[dict[str, tuple[type, ...]]] = {
    "Tensor": (torch.Tensor,),
    "None": (type(None),),
    "bool": (bool, torch.SymBool),
    "int": (int, torch.SymInt),
    "float": (float, torch.SymFloat),
    "complex": (complex,),
    "str": (str,),
    "bytes": (bytes,),
    "dtype": (torch.dtype,),
    "device": (torch.device,),
    "memory_format": (torch.memory_format,),
}
_TREE: Final = "___"


def _leaf_name(obj: object) -> str | None:
    return _leaf_name_of(type(obj))  # type: ignore[arg-type] # a class can be hashed


@lru_cache(maxsize=256)
def _leaf_name_of(kind: type) -> str | None:
    return next((name for name, kinds in _LEAVES.items() if issubclass(kind, kinds)), None)


def extract_names_from_schema(schema: str) -> list[str]:
    """Names of the arguments in a schema as `torch.library.infer_schema` writes it.

    `"(Tensor x, Tensor[] y, int n=1) -> Tensor"` gives ["x", "y", "n"]; names of results are left out.
    Raises FormatError for a text without arguments in parentheses.
    """
    begin, end = schema.find("("), _closing(schema)
    if begin < 0 or end < 0:
        raise FormatError(f"{schema!r} is no schema; expected '(Tensor x, ...) -> Tensor'")
    arguments = [part.strip() for part in _split(schema[begin + 1 : end])]
    names = []
    for argument in arguments:
        if argument in ("", "*"):
            continue
        kind, _, name = argument.partition("=")[0].strip().rpartition(" ")
        if not kind or not name.isidentifier():
            raise FormatError(f"{argument!r} in schema {schema!r} is no argument; expected a type and a name")
        names.append(name)
    return names


def _levels(text: str) -> Iterator[tuple[int, str, int]]:
    """Each character outside of quotes, with its place and how many brackets are open after it."""
    level, quote = 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
            continue
        if character in "'\"":
            quote = character
            continue
        level += (character in "([") - (character in ")]")
        yield place, character, level


def _closing(schema: str) -> int:
    return next((place for place, character, level in _levels(schema) if character == ")" and level == 0), -1)


def _split(arguments: str) -> list[str]:
    commas = [place for place, character, level in _levels(arguments) if character == "," and level == 0]
    return [arguments[a + 1 : b] for a, b in zip([-1, *commas], [*commas, len(arguments)], strict=True)]


def choose_kwargs_for_dynamic_shapes(
    ds_args: tuple[dict[int, Any], ...], ds_kwargs: Mapping[str, dict[int, Any]], forward_names: Sequence[str]
) -> dict[str, dict[int, Any]]:
    """Dynamic shapes of positional and named arguments as one dictionary by name.

    Args:
        ds_args: dynamic shapes of the positional arguments.
        ds_kwargs: those of the named ones; not changed.
        forward_names: names of the module's positional parameters, in order.

    Raises ConfigError when positional arguments have no name (`*args`), or one is also given by name.
    """
    if len(ds_args) > len(forward_names):
        raise ConfigError(
            f"dynamic shapes of {len(ds_args)} positional arguments, and forward names {len(forward_names)} "
            f"({', '.join(forward_names)}): what goes into *args has no name and needs dynamic shapes by position"
        )
    positional = dict(zip(forward_names, ds_args, strict=False))
    twice = sorted(set(positional) & set(ds_kwargs))
    if twice:
        raise ConfigError(f"dynamic shapes of {', '.join(twice)} are given by position and by name")
    return {**positional, **ds_kwargs}


def type_as_str_with_info(obj: Any) -> str:  # noqa: ANN401 - any pytree
    """Say how an object is put together again from its leaves.

    The name of a leaf ("Tensor", "None", "bool", "int", "float", ...), or the structure of a container
    (`tree_spec_as_name`). Raises ConfigError for an object that is neither.
    """
    return kind_and_leaves(obj, f"an object of type {type(obj).__qualname__}")[0]


def kind_and_leaves(obj: Any, what: str) -> tuple[str, list[Any]]:  # noqa: ANN401 - any pytree
    """Give `type_as_str_with_info(obj)`, and its leaves: one for a leaf. `what` it is goes into the error."""
    leaf = _leaf_name(obj)
    if leaf is not None:
        return leaf, [obj]
    row = _row(obj)
    if row is not None:
        return _row_name(type(obj), len(row)), row  # type: ignore[arg-type] # a class can be hashed
    flat, spec = _flatten(obj, what)
    return tree_spec_as_name(spec, spec.num_leaves), flat


def _row(obj: Any) -> list[Any] | None:  # noqa: ANN401 - any pytree
    """The leaves of a container of tensors of which there is nothing else to know: a list, a cache. None for others.

    What pytree gives, without its ways for each leaf: a cache has two for each layer, and every layer is given it.
    """
    node = pytree.SUPPORTED_NODES.get(type(obj))
    if node is None:
        return None
    children, context = node.flatten_fn(obj)
    if context is not None or not all(issubclass(kind, torch.Tensor) for kind in set(map(type, children))):
        return None
    return list(children)


@lru_cache(maxsize=64)
def _row_name(kind: type, count: int) -> str:
    _, spec = pytree.tree_flatten([0] * count)
    return tree_spec_as_name(pytree.TreeSpec(kind, None, spec.children()), count)


def _flatten(obj: Any, what: str) -> tuple[list[Any], pytree.TreeSpec]:  # noqa: ANN401 - any pytree
    flat, spec = pytree.tree_flatten(obj)
    strangers = sorted({f"{type(leaf).__module__}.{type(leaf).__qualname__}" for leaf in flat if not _leaf_name(leaf)})
    if strangers:
        raise ConfigError(
            f"{what} holds {', '.join(strangers)}, which is not a pytree and no leaf ({', '.join(_LEAVES)}); register "
            "it with torch.utils._pytree.register_pytree_node"
        )
    return flat, spec


def serialize_one(obj: Any, name: str | int, schema: str) -> Any:  # noqa: ANN401 - a leaf, or a list of leaves
    """Make an argument a leaf (as it is), or the list of its leaves.

    Args:
        obj: the argument.
        name: its name or place, for messages.
        schema: that of the operator, for messages.

    Raises ConfigError for what is neither a leaf nor a pytree of leaves.
    """
    if _leaf_name(obj) is not None:
        return obj
    return _flatten(obj, f"argument {name!r}" + (f" of {schema}" if schema else ""))[0]


def serialize_args(
    args: Any,  # noqa: ANN401 - a tuple of arguments, or one tensor
    kwargs: Mapping[str, Any] | None,
    schema: str,
    args_names: Sequence[str] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a call one flat list of leaves.

    Args:
        args: positional arguments; a tensor alone counts as one argument.
        kwargs: named arguments.
        schema: that of the operator: gives `args_names` when they are not given, and goes into messages.
        args_names: names of all parameters, in order; needed (or a schema) when there are named arguments.

    Returns:
        The leaves of `args`, then those of `kwargs` in the order of the parameters that `args` leave over (None for
        one that is not given), then those of names that are no parameter; and named arguments, of which none is left.

    Raises ConfigError for named arguments without names of parameters, or an argument that is not a pytree of leaves.
    """
    values = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    leaves: list[Any] = []
    for place, value in enumerate(values):
        _extend(leaves, serialize_one(value, place, schema))
    if kwargs:
        for name in _ordered(kwargs, len(values), schema, args_names):
            _extend(leaves, serialize_one(kwargs.get(name), name, schema))
    return tuple(leaves), {}


def _ordered(kwargs: Mapping[str, Any], n_args: int, schema: str, args_names: Sequence[str] | None) -> Sequence[str]:
    """Names of the arguments that follow `n_args` positional ones."""
    if args_names is None and not schema:
        raise ConfigError(f"arguments by name ({', '.join(kwargs)}) need args_names, or a schema that has their names")
    names = extract_names_from_schema(schema) if args_names is None else list(args_names)
    twice = sorted(set(names[:n_args]) & set(kwargs))
    if twice:
        raise ConfigError(f"arguments {', '.join(twice)} are given by position and by name")
    return [*names[n_args:], *(name for name in kwargs if name not in names)]


def _extend(leaves: list[Any], serialized: Any) -> None:  # noqa: ANN401 - a leaf, or a list of leaves
    if isinstance(serialized, list):
        leaves.extend(serialized)
    else:
        leaves.append(serialized)


def deserialize_args(
    res: Any,  # noqa: ANN401 - leaves, lists of leaves, or one tensor
    expected_types: Sequence[str],
    clone: bool = False,
    return_n_args: bool = False,
) -> Any:  # noqa: ANN401 - a tuple, or a tuple and a number
    """Put arguments together again from their leaves.

    Args:
        res: leaves in order; those of one container may be a list of their own. A tensor alone is one leaf.
        expected_types: `type_as_str_with_info` of each argument.
        clone: copy every tensor.
        return_n_args: also return how many items of `res` were used; without it all of them must be.

    Returns the arguments, or (arguments, number of items used).

    Raises FormatError when leaves and types do not fit.
    """
    items = [res] if isinstance(res, torch.Tensor) else list(res)
    values, used = [], 0
    for place, expected in enumerate(expected_types):
        value, count = _take(items[used:], expected, f"argument {place} of {len(expected_types)}")
        values.append(make_copy(value) if clone else value)
        used += count
    if return_n_args:
        return tuple(values), used
    if used != len(items):
        raise FormatError(f"{len(items)} leaves for arguments of types {list(expected_types)}, which take {used}")
    return tuple(values)


def _take(items: list[Any], expected: str, where: str) -> tuple[Any, int]:
    """One argument from the beginning of `items`, and how many of them it took."""
    if expected in _LEAVES:
        if not items or _leaf_name(items[0]) != expected:
            found = f"a {type(items[0]).__qualname__}" if items else "nothing"
            raise FormatError(f"{where} is {expected}, found {found}")
        return items[0], 1
    if not expected.startswith(_TREE):
        raise FormatError(f"{where} is of type {expected!r}; expected a structure or one of {', '.join(_LEAVES)}")
    count, spec = tree_spec_from_name(expected)
    if items and isinstance(items[0], list | tuple):
        leaves, used = list(items[0]), 1
    else:
        leaves, used = items[:count], count
    if len(leaves) != count:
        raise FormatError(f"{where} is made of {count} leaves, found {len(leaves)}")
    return pytree.tree_unflatten(leaves, spec), used


def deserialize_args_kwargs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    expected_types: tuple[Sequence[str], Sequence[str] | Mapping[str, str]],
    clone: bool = False,
    ordered_names: Sequence[str] | None = None,
    fill_kwargs: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a call together again from what `serialize_args` made of it.

    Args:
        args: leaves in order.
        kwargs: must be empty: an operator has been given leaves only.
        expected_types: types of the positional arguments; types of the named ones, by name, or in the order of the
            names that follow the positional arguments.
        clone: copy every tensor.
        ordered_names: names of all parameters, in order; needed when there are named arguments.
        fill_kwargs: the last of `ordered_names` is that of `**kwargs`, into which nothing goes.

    Returns positional and named arguments. A name without a type was not given: None is in its place, or nothing.

    Raises FormatError when leaves, types and names do not fit.
    """
    if kwargs:
        raise FormatError(f"an operator is given leaves only, found arguments by name: {', '.join(kwargs)}")
    types, named = expected_types
    values, used = deserialize_args(args, types, clone, return_n_args=True)
    names = list(ordered_names or ())[len(types) :]
    if fill_kwargs:
        if not names:
            raise FormatError("fill_kwargs needs ordered_names that end in the name of **kwargs")
        names = names[:-1]
    by_name = _types_by_name(named, names, fill_kwargs)
    rest, result = list(args)[used:], {}
    for name in [*names, *(name for name in by_name if name not in names)]:
        if name in by_name:
            result[name], count = _take(rest, by_name[name], f"argument {name!r}")
            rest = rest[count:]
        elif rest and rest[0] is None:
            rest = rest[1:]
    if fill_kwargs and rest == [None]:
        rest = []
    if rest:
        raise FormatError(f"{len(rest)} of {len(args)} leaves are left over; types: {list(types)}, {by_name}")
    return values, make_copy(result) if clone else result


def _types_by_name(named: Sequence[str] | Mapping[str, str], names: list[str], only: bool) -> dict[str, str]:
    if isinstance(named, Mapping):
        strangers = sorted(set(named) - set(names)) if only or (named and not names) else []
        if strangers:
            raise FormatError(f"types of {', '.join(strangers)}, which are no names after the positional arguments")
        return dict(named)
    if len(named) > len(names):
        raise FormatError(f"{len(named)} types of named arguments, and names for {len(names)}: {', '.join(names)}")
    return dict(zip(names, named, strict=False))


def make_copy(obj: Any) -> Any:  # noqa: ANN401 - any object
    """Copy an object: tensors and arrays are cloned (what is there twice, once), containers and caches made anew."""
    return _copy(obj, {})


def _copy(obj: Any, done: dict[int, Any]) -> Any:  # noqa: ANN401 - any object
    if isinstance(obj, torch.Tensor | np.ndarray):
        if id(obj) not in done:
            done[id(obj)] = obj.clone() if isinstance(obj, torch.Tensor) else obj.copy()
        return done[id(obj)]
    if _leaf_name(obj) is not None:
        return obj
    flat, spec = pytree.tree_flatten(obj)
    if spec.type is not None:
        return pytree.tree_unflatten([_copy(leaf, done) for leaf in flat], spec)
    return obj.clone() if callable(getattr(obj, "clone", None)) else copy.deepcopy(obj)
