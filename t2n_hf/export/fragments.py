"""What of a layer goes into its fragment, and what is the same for all layers and is computed once, outside."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from t2n_hf.trace.captured import Captured, Piece
from t2n_hf.trace.pieces import LAYER_OP

__all__ = ["FragmentPlan", "plan_fragment"]


@dataclass(frozen=True)
class FragmentPlan:
    """How a kind of layer is cut.

    Attributes:
        hoisted: calls that depend on nothing but inputs that layers share (masks, rotations), in order. They are
            written once for all layers that are given the same.
        shared: places of those inputs.
        parameters: what the fragment takes: inputs and hoisted values that it uses, then weights, then constants.
    """

    hoisted: tuple[fx.Node, ...]
    shared: tuple[int, ...]
    parameters: tuple[fx.Node, ...]


def plan_fragment(captured: Captured, number: int) -> FragmentPlan:
    """Cut piece `number` of a captured model."""
    piece = captured.pieces[number]
    shared = _shared_inputs(captured, number)
    hoisted = _hoisted(piece, [piece.inputs[place][0] for place in shared])
    outside = set(hoisted)
    inputs = [node for node, _ in piece.inputs]
    stored = [*piece.weights, *piece.constants]
    kept = [node for node in (*inputs, *hoisted) if any(user not in outside for user in node.users)]
    return FragmentPlan(tuple(hoisted), shared, (*kept, *stored))


def _shared_inputs(captured: Captured, number: int) -> tuple[int, ...]:
    """Places of inputs that layers of the kind get from fewer nodes than there are layers.

    Two masks by turns count, the output of the layer before does not. A single layer may share with other kinds.
    """
    calls = [node for node in captured.graph.nodes if node.target is LAYER_OP]
    mine = [node for node in calls if captured.calls[node.args[0]].piece == number]
    uses: dict[fx.Node, int] = {}
    for call in calls:
        for given in set(call.args[1]):
            uses[given] = uses.get(given, 0) + 1
    shared = []
    for place in range(len(captured.pieces[number].inputs)):
        given = {call.args[1][place] for call in mine}
        if len(given) < len(mine) or (len(mine) == 1 and uses[given.pop()] > 1):
            shared.append(place)
    return tuple(shared)


def _hoisted(piece: Piece, invariant: Iterable[fx.Node]) -> list[fx.Node]:
    known = set(invariant)
    hoisted = []
    for node in piece.graph.nodes:
        if node.op != "call_function" or not _is_tensor(node):
            continue
        if all(source in known for source in node.all_input_nodes if _is_tensor(source)):
            known.add(node)
            hoisted.append(node)
    return hoisted


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | list | tuple)
