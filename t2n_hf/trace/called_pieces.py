"""What of the layers that were traced one by one is in the graph of the model, and what that graph has to give them."""

from dataclasses import replace
from itertools import compress
from typing import Any

from t2n_hf.trace.captured import Captured, Piece
from t2n_hf.trace.passes import make_pure
from t2n_hf.trace.passes.lengths import free_lengths
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


def _drop_unused_inputs(piece: Piece) -> list[bool]:
    """Leave out inputs that nothing uses; say of each whether it is used."""
    results = {node for node, _ in piece.outputs}
    used = [bool(node.users) or node in results for node, _ in piece.inputs]
    for (node, _), needed in zip(piece.inputs, used, strict=True):
        if not needed:
            piece.graph.erase_node(node)
    piece.inputs[:] = compress(piece.inputs, used)
    return used
