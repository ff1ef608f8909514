"""When two layers are one kind: all of a layer's graph that its calls must share, as a value with an equality."""

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from t2n_hf.trace.captured import Piece
from t2n_hf.trace.digest import digest_of

__all__ = ["describe_piece", "join_equal_pieces"]


def describe_piece(piece: Piece) -> Any:  # noqa: ANN401 - any value with an equality
    """The calls of a piece, with shapes and dtypes of what they start from and values of constants.

    Nodes are known by their places, inputs by their order, weights by their names in the layer, constants by their
    values, lengths by their expressions. Checks, and calls that nothing uses, do not count.
    """
    names: dict[fx.Node, str] = {node: f"input {at}" for at, (node, _) in enumerate(piece.inputs)}
    names |= {node: f"weight {name}" for node, name in piece.weights.items()}
    names |= {node: f"constant {_digest(value)}" for node, value in piece.constants.items()}
    starts = [(name, _kind(node)) for node, name in names.items()]
    used = _used(piece)
    calls: list[Any] = []
    for node in piece.graph.nodes:
        if node.op == "call_function" and node in used:
            names[node] = f"%{len(calls)}"
            calls.append((str(node.target), _arguments(node, names), _kind(node)))
    return piece.name, calls, starts, [names[node] for node, _ in piece.outputs]


def join_equal_pieces(pieces: list[Piece]) -> tuple[list[Piece], list[int]]:
    """Each piece once, and for each of the given ones the number of the one that it equals."""
    kept: list[tuple[Any, Piece]] = []
    numbers = []
    for piece in pieces:
        description = describe_piece(piece)
        number = next((at for at, (known, _) in enumerate(kept) if known == description), len(kept))
        if number == len(kept):
            kept.append((description, piece))
        numbers.append(number)
    return [piece for _, piece in kept], numbers


def _used(piece: Piece) -> set[fx.Node]:
    """The nodes that results depend on as tensors."""
    front = [node for node, _ in piece.outputs]
    used = set(front)
    while front:
        for source in front.pop().all_input_nodes:
            if source not in used and _is_tensor(source):
                used.add(source)
                front.append(source)
    return used


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _arguments(node: fx.Node, names: dict[fx.Node, str]) -> str:
    def shown(source: fx.Node) -> Any:  # noqa: ANN401 - a name or a number
        return names[source] if source in names else _number(source.meta.get("val"))

    return repr(fx.map_arg((node.args, node.kwargs), shown))


def _number(value: Any) -> Any:  # noqa: ANN401 - a number
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _kind(node: fx.Node) -> Any:  # noqa: ANN401 - any value with an equality
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return str([_number(length) for length in value.shape]), value.dtype
    return len(value) if isinstance(value, list | tuple) else None


def _digest(value: torch.Tensor) -> str:
    with _disable_current_modes():  # pieces are compared while a model is traced, too
        return f"{tuple(value.shape)} {value.dtype} {digest_of(value)}"
