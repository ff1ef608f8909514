"""What a trace of a layer depends on, as values that can be compared: its parts, and its arguments."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.trace.digest import digest_of
from t2n_hf.trace.piece_by_piece_serialize import deserialize_args, kind_and_leaves
from t2n_hf.trace.walk import modules_of, named_modules_of, own_attributes, tensors_in

__all__ = [
    "Argument",
    "Arguments",
    "PieceError",
    "bind",
    "describe_layer",
    "layer_index",
    "may_count",
    "piece_name",
    "register_leaf_setter",
    "shape_of",
]

_INDEX: Final = "layer_idx"
_SCALARS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_WAYS: Final[dict[type, tuple[type, ...]]] = {
    bool: _SCALARS,
    torch.Tensor: (torch.Tensor,),
    tuple: (tuple, list),
    dict: (dict,),
    functools.partial: (functools.partial,),  # activations are made of them, one for each layer
}
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_DEPTH: Final = 4  # of functions that enclose functions; one may enclose itself
_LEAF_SETTERS: Final[dict[type, Callable[[Any, Mapping[int, torch.Tensor]], None]]] = {}


class PieceError(Exception):
    """This layer cannot be captured on its own; the text says why."""


def describe_layer(layer: nn.Module) -> Any:  # noqa: ANN401 - any value with an equality
    """Everything of a layer that its trace can depend on, except which layer of the model it is.

    Types, shapes and dtypes of parameters and how they are tied, values of buffers that have them, scalar attributes of
    all submodules, hooks; other attributes count by identity.
    """
    ties: dict[int, int] = {}
    parts = named_modules_of(layer)
    modules = [(name, type(module), *_own_facts(module)) for name, module in parts]
    tensors = [(name, _describe(tensor), ties.setdefault(id(tensor), len(ties))) for name, tensor in tensors_in(parts)]
    return tuple(modules), tuple(tensors)


def _own_facts(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    names = sorted(own_attributes(module))
    attributes = tuple([(name, _describe_own(own[name], module)) for name in names if name != _INDEX])
    hooks = [tuple(map(_describe_hook, own[kind].values())) if own[kind] else () for kind in _HOOKS]
    return attributes, *hooks


def _describe_own(value: Any, module: nn.Module) -> Any:  # noqa: ANN401 - any value with an equality
    """An attribute; a method of its own that a module was given (another forward) is the same one in many layers."""
    if type(value) is MethodType and value.__self__ is module:
        return ("method of its own", id(value.__func__))
    return _describe(value)


def _describe_hook(hook: object, depth: int = 0) -> Any:  # noqa: ANN401 - any value with an equality
    """A hook by its code and what it encloses: libraries make one function for each layer, of others that they make."""
    if isinstance(hook, MethodType):
        return ("method", hook.__func__, id(hook.__self__))
    if not isinstance(hook, FunctionType) or depth > _DEPTH:
        return _describe(hook)
    enclosed = tuple(_describe_hook(cell.cell_contents, depth + 1) for cell in hook.__closure__ or ())
    return ("function", hook.__code__, enclosed, _describe(hook.__defaults__), _describe(hook.__kwdefaults__))


def _describe(value: Any) -> Any:  # noqa: ANN401 - any value with an equality
    kind = type(value)
    way = _way(kind)  # type: ignore[arg-type] # a class can be hashed
    if way in (bool, object):  # a number, a text; something that counts by identity
        return (kind.__name__, value) if way is bool else ("object", id(value))
    if way is torch.Tensor:
        facts = (tuple(value.shape), value.dtype)
        return facts if isinstance(value, FakeTensor) else (*facts, digest_of(value))
    if way is tuple:
        return (kind.__name__, tuple(_describe(item) for item in value))
    if way is dict:
        return ("dict", tuple((repr(key), _describe(item)) for key, item in value.items()))
    return ("partial", _describe(value.func), _describe(value.args), _describe(value.keywords))


@functools.lru_cache(maxsize=256)
def _way(kind: type) -> type:
    """The class that says how values of `kind` are described.

    By the class: to ask a value whether it is an instance asks a configuration for its attributes, which is slow.
    """
    for way, kinds in _WAYS.items():
        if issubclass(kind, kinds):
            return way
    return object


def layer_index(layer: nn.Module) -> int | None:
    """The `layer_idx` that the layer's modules agree on; None when they have none, or different ones."""
    found = {vars(module)[_INDEX] for module in modules_of(layer) if isinstance(vars(module).get(_INDEX), int)}
    return found.pop() if len(found) == 1 else None


def piece_name(layer: nn.Module) -> str:
    """LlamaDecoderLayer -> llama_decoder_layer; GPT2Block -> gpt2_block."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(layer).__name__)
    return words.lower()


def shape_of(leaf: object) -> Any:  # noqa: ANN401 - any value with an equality
    """Shape and dtype of a tensor with symbols as expressions; any other leaf is its own description."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(d.node.expr if isinstance(d, torch.SymInt) else d for d in leaf.shape), leaf.dtype)
    return _describe(leaf)


def may_count(layer: nn.Module) -> bool:
    """Whether a trace of this layer may depend on its `layer_idx`.

    Layers of transformers use it to find their part of a cache, and for nothing else while they run; their forwards and
    attention may be replaced by a user's.
    """
    return any(_may_count(module) for module in modules_of(layer) if _INDEX in vars(module))


def _may_count(module: nn.Module) -> bool:
    own = getattr(module.forward, "__func__", module.forward)
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return (
        not type(module).__module__.startswith("transformers.")
        or not str(getattr(own, "__module__", "")).startswith(("transformers.", "t2n_hf."))
        or attention not in (None, "sdpa", "eager")
    )


@dataclass(frozen=True)
class Argument:
    """One bound argument: leaves `start` up to `stop`. `kind` is their `type_as_str_with_info`."""

    name: str
    start: int
    stop: int
    kind: str

    @property
    def is_leaf(self) -> bool:
        """Whether it is a tensor or a number, not a container."""
        return not self.kind.startswith("___")

    def value(self, leaves: list[Any]) -> Any:  # noqa: ANN401 - any pytree
        """The argument made of its part of the leaves of a call, in a fresh container."""
        return deserialize_args(leaves[self.start : self.stop], [self.kind])[0]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, bound to the layer's signature and taken apart into leaves."""

    bound: inspect.BoundArguments
    arguments: tuple[Argument, ...]
    leaves: list[Any]

    def alike(self, other: "Arguments") -> bool:
        """Whether both calls have the same parameters and structure, and equal leaves where these are no tensors."""
        if len(self.leaves) != len(other.leaves) or self.arguments != other.arguments:
            return False
        for a, b in zip(self.leaves, other.leaves, strict=True):  # every layer is given what all layers keep
            if (
                a is b
                or type(a) is type(b) is FakeTensor
                or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))
            ):
                continue
            if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or _describe(a) != _describe(b):
                return False
        return True

    def snapshot(self) -> "Arguments":
        """The leaves as they are now; what the model does to its containers later is not seen."""
        return Arguments(self.bound, self.arguments, list(self.leaves))

    def argument_of(self, leaf: int) -> Argument:
        """The argument that a leaf belongs to."""
        return next(argument for argument in self.arguments if argument.start <= leaf < argument.stop)

    def leaf_name(self, leaf: int) -> str:
        """A name for a leaf: that of its argument, with a number when the argument is a container."""
        argument = self.argument_of(leaf)
        return argument.name if argument.is_leaf else f"{argument.name}_{leaf - argument.start}"

    def rebuilt(self, leaves: list[Any]) -> inspect.BoundArguments:
        """The same call with other leaves, in fresh containers."""
        return _with_values(self.bound, [argument.value(leaves) for argument in self.arguments])

    def values_of(self, bound: inspect.BoundArguments) -> list[Any]:
        """The arguments of a call built by `rebuilt`, in order."""
        return _values(bound)

    def replace(self, changes: Mapping[int, torch.Tensor]) -> None:
        """Put new tensors into the caller's own containers, as the layer would have done."""
        for argument, value in zip(self.arguments, _values(self.bound), strict=True):
            mine = {leaf: new for leaf, new in changes.items() if argument.start <= leaf < argument.stop}
            if not mine:
                continue
            put = _LEAF_SETTERS.get(type(value))
            if put is not None:
                put(value, {leaf - argument.start: new for leaf, new in mine.items()})
            else:
                leaves = [mine.get(at, leaf) for at, leaf in enumerate(self.leaves)]
                _transplant(value, argument.value(leaves))


def _named_values(bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
    """Each argument with its name; those of `**kwargs`, which is the last parameter, one by one."""
    named = list(bound.arguments.items())
    if named and _is_rest(bound, named[-1][0]):
        named.extend(named.pop()[1].items())
    return named


def _is_rest(bound: inspect.BoundArguments, name: str) -> bool:
    return bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD


def _values(bound: inspect.BoundArguments) -> list[Any]:
    return [value for _, value in _named_values(bound)]


def _with_values(bound: inspect.BoundArguments, values: list[Any]) -> inspect.BoundArguments:
    fresh = inspect.BoundArguments(bound.signature, type(bound.arguments)())
    rest = iter(values)
    for name, value in bound.arguments.items():
        fresh.arguments[name] = {key: next(rest) for key in value} if _is_rest(bound, name) else next(rest)
    return fresh


def register_leaf_setter(kind: type, put: Callable[[Any, Mapping[int, torch.Tensor]], None]) -> None:
    """Let `put(container, {number of a leaf: tensor})` replace leaves of containers of this class.

    Containers of other classes are made anew with all of their leaves. Raises ValueError for a class that has one.
    """
    if kind in _LEAF_SETTERS:
        raise ValueError(f"leaves of {kind.__qualname__} are replaced by {_LEAF_SETTERS[kind].__qualname__} already")
    _LEAF_SETTERS[kind] = put


def _transplant(target: object, source: object) -> None:
    """Make a container equal to another one of its type, in place."""
    if isinstance(target, list):
        target[:] = source  # type: ignore[call-overload]
    elif isinstance(target, dict):
        target.clear()
        target.update(source)  # type: ignore[call-overload]
    elif isinstance(target, tuple) or not hasattr(target, "__dict__"):
        raise PieceError(f"it changes tensors inside a {type(target).__name__}, which cannot be changed from outside")
    else:
        vars(target).clear()
        vars(target).update(vars(source))


@functools.lru_cache(maxsize=256)
def _signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Without its first parameter. Layers of a class have one, and it takes longer to find than to bind."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@functools.lru_cache(maxsize=256)
def _places(method: Callable[..., Any], count: int, keywords: tuple[str, ...]) -> dict[str, Any]:
    """Where each parameter gets its value: the number of an argument, or a keyword; several for `*args`, `**kwargs`."""
    signature = _signature_of(method)
    return dict(signature.bind(*range(count), **dict(zip(keywords, keywords, strict=True))).arguments)


def _bound(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """What `inspect.Signature.bind` gives, which goes through all parameters at each call."""
    if "forward" in vars(layer):
        return inspect.signature(layer.forward).bind(*args, **kwargs)
    method = type(layer).forward
    values: Any = {}
    for name, place in _places(method, len(args), tuple(kwargs)).items():
        if type(place) is dict:
            values[name] = {key: kwargs[key] for key in place}
        elif type(place) is tuple:
            values[name] = tuple(args[at] for at in place)
        else:
            values[name] = args[place] if type(place) is int else kwargs[place]
    return inspect.BoundArguments(_signature_of(method), values)


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Arguments:
    """Bind a call to the signature of the layer's forward.

    Raises:
        PieceError: the call does not fit the signature, or an argument is something that cannot be compared.
    """
    try:
        bound = _bound(layer, args, kwargs)
    except TypeError as error:
        raise PieceError(f"the call of {where} does not fit its signature: {error}") from error
    arguments: list[Argument] = []
    leaves: list[Any] = []
    for name, value in _named_values(bound):
        try:
            kind, flat = kind_and_leaves(value, f"argument {name!r} of {where}")
        except (ConfigError, FormatError) as error:
            raise PieceError(str(error)) from error
        arguments.append(Argument(name, len(leaves), len(leaves) + len(flat), kind))
        leaves.extend(flat)
    return Arguments(bound, tuple(arguments), leaves)
