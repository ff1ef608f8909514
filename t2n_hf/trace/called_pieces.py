"""What of the layers that were traced one by one is in the graph of the model, and what that graph has to give them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from torch import fx

from t2n_hf.trace.captured import Captured, Piece
from t2n_hf.trace.layers import PieceError
from t2n_hf.trace.passes import make_pure
from t2n_hf.trace.passes.lengths import free_lengths
from t2n_hf.trace.passes.writes import owner_of, writes
from t2n_hf.trace.pieces import LAYER_OP, PieceRecorder
from t2n_hf.trace.same_graph import join_equal_pieces

__all__ = ["keep_called_pieces"]


def keep_called_pieces(captured: Captured, recorder: PieceRecorder) -> None:
    """Fill in the pieces and calls of a graph whose layers `recorder` recorded.

    Inputs that a piece asks for nothing but a length are no inputs of it any more, and kinds of layers whose graphs are
    equal then are one piece.
    """
    nodes: dict[Any, Any] = {node.args[0]: node for node in captured.graph.nodes if node.target is LAYER_OP}
    # torch.export may have run the model more than once; what its graph does not call is of an earlier run.
    calls = {number: call for number, call in recorder.calls.items() if number in nodes}
    kinds = list(dict.fromkeys(call.piece for call in calls.values()))
    pieces = [recorder.pieces[kind] for kind in kinds]
    _refuse_shared_writes(captured, [(nodes[number], call.piece) for number, call in calls.items()], recorder.pieces)
    for graph in (captured, *pieces):
        make_pure(graph)
        free_lengths(graph.graph)
    used = {kind: _drop_unused_inputs(piece) for kind, piece in zip(kinds, pieces, strict=True)}
    for number, call in calls.items():
        node = nodes[number]
        node.args = (number, list(compress(node.args[1], used[call.piece])))
    # Kinds were told apart by all that a trace may depend on; now that they are traced, it is seen on what it did.
    captured.pieces, joined = join_equal_pieces(pieces)
    of_kind = dict(zip(kinds, joined, strict=True))
    captured.calls = {number: replace(call, piece=of_kind[call.piece]) for number, call in calls.items()}


def _refuse_shared_writes(captured: Captured, calls: Sequence[tuple[fx.Node, int]], pieces: Sequence[Piece]) -> None:
    """Raise PieceError when the model writes into what a layer gives or takes in two places, of which one is a view.

    In the model the other place shows what was written. Here the results of a call are tensors of their own.
    """
    written = {owner_of(node.args[0]) for node in captured.graph.nodes if writes(node)}
    shared = {kind: _shared_places(pieces[kind]) for _, kind in calls} if written else {}
    for call, kind in calls if written else ():
        items = {user.args[1]: user for user in call.users}
        taken: Any = call.args[1]
        for sort, place in shared[kind]:
            if (items.get(place) if sort == "result" else owner_of(taken[place])) in written:
                raise PieceError(
                    f"the model writes into a tensor that {pieces[kind].where} gives or takes as a part of another"
                )


def _shared_places(piece: Piece) -> list[tuple[str, int]]:
    """The results that look at another result, at a weight, or at an argument, and these arguments, by number."""
    places: dict[fx.Node, list[tuple[str, int]]] = {node: [("input", at)] for at, (node, _) in enumerate(piece.inputs)}
    places.update({node: [("weight", 0)] for node in (*piece.weights, *piece.constants)})
    for at, (node, _) in enumerate(piece.outputs):
        places.setdefault(owner_of(node), []).append(("result", at))
    return [place for found in places.values() if len(found) > 1 for place in found if place[0] != "weight"]


def _drop_unused_inputs(piece: Piece) -> list[bool]:
    """Leave out inputs that nothing uses; say of each whether it is used."""
    results = {node for node, _ in piece.outputs}
    used = [bool(node.users) or node in results for node, _ in piece.inputs]
    for (node, _), needed in zip(piece.inputs, used, strict=True):
        if not needed:
            piece.graph.erase_node(node)
    piece.inputs[:] = compress(piece.inputs, used)
    return used
