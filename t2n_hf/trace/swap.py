"""Other tensors, methods and attributes in the place of a module's own, for a while."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError
from t2n_hf.trace.walk import are_the_same, modules_of, named_tensors_of, names_of, own_attributes

__all__ = [
    "FunctionReplaced",
    "attributes_kept",
    "attributes_replaced",
    "buffers_watched",
    "evaluating",
    "methods_replaced",
    "methods_replaced_by_class",
    "plain_tensors_kept",
    "tensors_of",
    "tensors_replaced",
]

_ABSENT: Final = object()


@contextmanager
def attributes_replaced(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Let `module` itself have these attributes (methods too), until the block is left in any way."""
    own = vars(module)
    before = {name: own.get(name, _ABSENT) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                del own[name]
            else:
                own[name] = value


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """After any exit `module` itself has the attributes, parameters and parts that it had, and no others."""
    own = vars(module)
    before = dict(own)
    try:
        yield
    finally:
        own.clear()
        own.update(before)


def methods_replaced(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Let `module` itself have these functions, which take it first, as methods, until the block is left in any way."""
    return attributes_replaced(module, {name: MethodType(method, module) for name, method in methods.items()})


@contextmanager
def methods_replaced_by_class(
    model: nn.Module, methods_of: Callable[[Any], Mapping[str, Callable[..., Any]]]
) -> Iterator[None]:
    """`methods_replaced` for `model` and each of its parts, by what `methods_of` gives for their classes."""
    with ExitStack() as stack:
        for module in modules_of(model):
            methods = methods_of(type(module))
            if methods:
                stack.enter_context(methods_replaced(module, methods))
        yield


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of `module`, under each of its names."""
    return dict(named_tensors_of(module))


@contextmanager
def tensors_replaced(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let `module` hold `tensors`, by the names that `tensors_of` gives, until the block is left in any way.

    `torch.func.functional_call` leaves its stand-ins behind in a module that is registered under two names: it puts
    back what it found under the second one.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            where, _, key = name.rpartition(".")
            owner = module.get_submodule(where)
            slots: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            undo.append((slots, key, slots[key]))
            slots[key] = tensor
        yield
    finally:
        for slots, key, before in reversed(undo):
            slots[key] = before


@contextmanager
def plain_tensors_kept(module: nn.Module) -> Iterator[None]:
    """Put back the tensors that are plain attributes of `module` and of its children, or in a list or dict that is one.

    After any exit. A forward that runs on stand-ins may keep one of them; the module would be left with a tensor
    without values. Containers are put back themselves: torch.export leaves copies, which parts do not share.
    """
    before = [(child, own_attributes(child), dict(vars(child))) for child in modules_of(module)]
    held = [(name, old[name]) for _, names, old in before for name in names if type(old[name]) in (dict, list)]
    shared = [value for name, value in held if not name.startswith("_")]
    dicts = [(value, dict(value)) for value in shared if type(value) is dict]
    lists = [(value, list(value)) for value in shared if type(value) is list]
    try:
        yield
    finally:
        for child, names, old in before:
            own = vars(child)
            if not are_the_same(own, old):
                absent = dict.fromkeys(own_attributes(child), _ABSENT)
                _put_back_tensors(own, {**absent, **{name: old[name] for name in names}})
        for value, copy in dicts:
            _put_back_tensors(value, {**dict.fromkeys(value, _ABSENT), **copy})
        for found, items in lists:
            kept = {id(item) for item in items}
            if any(isinstance(item, torch.Tensor) and id(item) not in kept for item in found):
                found[:] = items


def _put_back_tensors(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Put tensors and containers back by name; `before` says for each name what was there, or that nothing was."""
    for name, old in before.items():
        new = attributes.get(name, _ABSENT)
        if old is new or not (isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or _is_copy(new, old)):
            continue
        if old is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = old


def _is_copy(new: object, old: object) -> bool:
    return type(new) is type(old) and type(old) in pytree.SUPPORTED_NODES


@contextmanager
def buffers_watched(module: nn.Module) -> Iterator[None]:
    """Raise CaptureError when the block puts another tensor in the place of a buffer: no operator shows that."""
    names = names_of(module)
    before = [(child, child._buffers, dict(child._buffers)) for child in names if child._buffers]
    yield
    for child, buffers, old in before:
        for name, tensor in old.items():
            if buffers.get(name) is not tensor:
                label = f"{names[child]}.{name}" if names[child] else name
                raise CaptureError(
                    f"forward replaces buffer {label!r}, which the module keeps from call to call; an archive cannot. "
                    "Make it an input and an output"
                )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have `module` and its parts in evaluation mode until the block is left in any way; each is as before then."""
    training = [part for part in modules_of(module) if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


@final
class FunctionReplaced(TorchFunctionMode):
    """While it is entered, calls `other` in the place of `function`, one of torch's, with what that is given."""

    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._other = function, other

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the function gives
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))
