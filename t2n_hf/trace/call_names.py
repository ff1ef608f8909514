"""What the arguments and results of each layer are called, noted on the nodes of a model that is traced as a whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from t2n_hf.trace.layers import Arguments, PieceError, bind

__all__ = ["given_names", "layer_calls_named", "result_names"]

# torch.export hands `meta["custom"]` on to the graph that it gives.
_META: Final = "custom"
_GIVEN: Final = "t2n_hf.given"
_RESULTS: Final = "t2n_hf.results"


@contextmanager
def layer_calls_named(module: nn.Module, layers: tuple[str, ...]) -> Iterator[None]:
    """Note names while `module` is traced in the block; `layers` are names of its ModuleLists of layers."""
    with ExitStack() as stack:
        for list_name in layers:
            for key, layer in module.get_submodule(list_name).named_children():
                stack.enter_context(_watched(layer, f"{list_name}.{key}"))
        yield


@contextmanager
def _watched(layer: nn.Module, where: str) -> Iterator[None]:
    calls: list[Arguments] = []

    def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _bound(layer, args, kwargs, where)
        if arguments is not None:
            calls.append(arguments)
            for place, leaf in enumerate(arguments.leaves):
                _note(leaf, _GIVEN, where, (place, arguments.leaf_name(place)))

    def after(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:  # noqa: ANN401
        new = _bound(layer, args, kwargs, where)
        if not calls or new is None:
            return
        for place, name, leaf in _results(calls.pop(), new, result):
            _note(leaf, _RESULTS, where, (place, name))

    hooks = (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _bound(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Arguments | None:
    """The call; None for one that a piece could not take, whose arguments have no names then."""
    try:
        return bind(layer, args, kwargs, where)
    except PieceError:
        return None


def _results(old: Arguments, new: Arguments, result: Any) -> Iterator[tuple[int, str, torch.Tensor]]:  # noqa: ANN401
    """Place, name and tensor of each result: those of the layer itself, then the tensors that it changed."""
    pairs = list(zip(old.leaves, new.leaves, strict=False))
    changed = {id(b): f"{old.leaf_name(at)}_out" for at, (a, b) in enumerate(pairs) if a is not b}
    given = {id(leaf) for leaf in old.leaves}
    leaves = [*torch.utils._pytree.tree_leaves(result), *(b for a, b in pairs if a is not b)]
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in given}
    plain = [key for key in tensors if key not in changed]
    names = {key: "output" if len(plain) == 1 else f"output_{at}" for at, key in enumerate(plain)} | changed
    for place, (key, tensor) in enumerate(tensors.items()):
        yield place, names[key], tensor


def _note(leaf: object, kind: str, where: str, fact: tuple[int, str]) -> None:
    mode = get_proxy_mode()
    if mode is None or not isinstance(leaf, torch.Tensor):
        return
    slot = get_proxy_slot(leaf, mode.tracer, None)
    if slot is not None:
        meta = slot.proxy.node.meta
        mine = meta.get(_META, {})
        # A new dictionary: nodes share theirs.
        meta[_META] = {**mine, kind: {**mine.get(kind, {}), where: fact}}


def given_names(node: fx.Node) -> dict[str, tuple[int, str]]:
    """Name of a layer -> place and name among its arguments of what this node gives."""
    return node.meta.get(_META, {}).get(_GIVEN, {})


def result_names(node: fx.Node) -> dict[str, tuple[int, str]]:
    """Name of a layer -> place and name among its results of what this node gives."""
    return node.meta.get(_META, {}).get(_RESULTS, {})
