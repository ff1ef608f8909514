"""Repeated layers found in a graph of the whole model: what a node's module stack says is one layer becomes one call.

The counterpart of `pieces`, which traces one layer of a kind and takes the others to be like it: here every layer has
been traced, and layers share a piece only when their graphs are the same, node by node.
"""

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from t2n_hf.trace.call_names import given_names, result_names
from t2n_hf.trace.captured import Captured, Piece, PieceCall
from t2n_hf.trace.layers import piece_name
from t2n_hf.trace.passes.lengths import free_lengths
from t2n_hf.trace.pieces import LAYER_OP
from t2n_hf.trace.same_graph import join_equal_pieces

__all__ = ["outline_layers"]


@dataclass
class _Region:
    """The nodes of one layer, and what goes in and out. `weights` and `constants` are those of this layer alone."""

    where: str
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    weights: dict[fx.Node, str] = field(default_factory=dict)
    constants: dict[fx.Node, str] = field(default_factory=dict)


def outline_layers(
    captured: Captured, module: nn.Module, layers: Iterable[str], name_weight: Callable[[str], str]
) -> list[str]:
    """Replace the layers of a captured graph by calls of `t2n_hf::layer`, in place, and fill in pieces and calls.

    Args:
        captured: a graph without pieces and without writes.
        module: the module that was traced.
        layers: names, in `module`, of its ModuleLists of layers.
        name_weight: gives a module's name among the weights from its name inside `module`.

    Returns why layers were left in place, a line for each.
    """
    notes: list[str] = []
    pieces: list[Piece] = []
    free_lengths(captured.graph)
    for region in _regions(captured, layers):
        label = name_weight(region.where)
        if not _find_borders(captured, region, label):
            notes.append(f"{label} is left in place: something outside of it is computed between its parts")
            continue
        pieces.append(_piece(captured, region, piece_name(module.get_submodule(region.where)), label))
        _replace(captured, region, f"{label}.")
    captured.pieces, numbers = join_equal_pieces(pieces)
    for call, number in enumerate(numbers):
        captured.calls[call] = replace(captured.calls[call], piece=number)
    return notes


def _regions(captured: Captured, layers: Iterable[str]) -> list[_Region]:
    """The calls of layers, in the order in which they begin."""
    lists = tuple(layers)
    found: dict[tuple[str, str], _Region] = {}
    for node in captured.graph.nodes:
        if node.op != "call_function" or not _is_tensor(node):
            continue
        for key, (path, _kind) in (node.meta.get("nn_module_stack") or {}).items():
            place = path.partition("@")[0]
            if place.rpartition(".")[0] in lists:
                found.setdefault((key, path), _Region(place, [])).nodes.append(node)
                break
    return list(found.values())


def _find_borders(captured: Captured, region: _Region, label: str) -> bool:
    """Fill in what goes in and out; False when the layer cannot be one call, or gives and takes nothing."""
    inside = set(region.nodes)
    sources = dict.fromkeys(source for node in region.nodes for source in node.all_input_nodes)
    for source in sources:
        if source not in inside and _is_tensor(source):
            _sort_source(captured, region, source, label)
    order = (*captured.weights, *captured.constants)
    region.weights = {node: region.weights[node] for node in order if node in region.weights}
    region.constants = {node: region.constants[node] for node in order if node in region.constants}
    region.outputs = [node for node in region.nodes if not set(node.users) <= inside]
    if not region.outputs or not all(isinstance(node.meta["val"], torch.Tensor) for node in region.outputs):
        return False
    region.inputs = _ordered(region.inputs, [given_names(node).get(region.where) for node in region.inputs])
    region.outputs = _ordered(region.outputs, [result_names(node).get(region.where) for node in region.outputs])
    places = {node: at for at, node in enumerate(captured.graph.nodes)}
    last_source = max((places[node] for node in region.inputs), default=-1)
    first_reader = min(places[user] for node in region.outputs for user in node.users if user not in inside)
    return last_source < first_reader


def _sort_source(captured: Captured, region: _Region, source: fx.Node, label: str) -> None:
    start = f"{label}."
    mine = all(_in(user, region.where) for user in source.users)
    name = captured.weights.get(source) or captured.constant_names.get(source)
    if source in captured.weights and name is not None and name.startswith(start):
        region.weights[source] = name.removeprefix(start)
    elif source in captured.constants and name is not None and (name.startswith(start) or mine):
        region.constants[source] = name.removeprefix(start)
    else:
        region.inputs.append(source)


def _in(node: fx.Node, where: str) -> bool:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(path.partition("@")[0] == where for path, _ in stack)


def _ordered(nodes: list[fx.Node], facts: list[tuple[int, str] | None]) -> list[fx.Node]:
    """Nodes in the order in which the call has them; those that the call does not name follow."""
    last = len(nodes) + max((fact[0] for fact in facts if fact), default=0)
    keys = {node: fact[0] if fact else last for node, fact in zip(nodes, facts, strict=True)}
    return sorted(nodes, key=keys.__getitem__)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _piece(captured: Captured, region: _Region, name: str, where: str) -> Piece:
    """Copy a layer into a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node, hint: str) -> fx.Node:
        copies[node] = graph.placeholder(hint)
        copies[node].meta = dict(node.meta)
        return copies[node]

    weights = {place(node, "weight"): label for node, label in region.weights.items()}
    constants = {place(node, "constant"): captured.constants[node] for node in region.constants}
    labels = {copies[node]: f"{where}.{label}" for node, label in region.constants.items()}
    names = _names([given_names(node).get(region.where) for node in region.inputs], "input")
    inputs = [(place(node, "input"), label) for node, label in zip(region.inputs, names, strict=True)]
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # a length
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    names = _names([result_names(node).get(region.where) for node in region.outputs], "output")
    outputs = [(copies[node], label) for node, label in zip(region.outputs, names, strict=True)]
    graph.output([node for node, _ in outputs])
    return Piece(
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        constants=constants,
        constant_names=labels,
        name=name,
        where=where,
    )


def _names(facts: list[tuple[int, str] | None], otherwise: str) -> list[str]:
    """A name each, no two alike: those that the call gives, else `otherwise`, with numbers when there are several."""
    given = {fact[1] for fact in facts if fact}
    alone = sum(fact is None for fact in facts) == 1 and otherwise not in given
    numbered = (f"{otherwise}_{at}" for at in itertools.count())
    rest = iter([otherwise]) if alone else (name for name in numbered if name not in given)
    return [fact[1] if fact else next(rest) for fact in facts]


def _replace(captured: Captured, region: _Region, prefix: str) -> None:
    """Put one call in the place of a layer."""
    graph, call = captured.graph, len(captured.calls)
    captured.calls[call] = PieceCall(call, prefix)
    inside = set(region.nodes)
    after = max([*region.inputs, region.nodes[0].prev], key={n: at for at, n in enumerate(graph.nodes)}.__getitem__)
    with graph.inserting_after(after):
        node = graph.call_function(LAYER_OP, (call, list(region.inputs)))
    node.meta = {**region.outputs[-1].meta, "val": [output.meta["val"] for output in region.outputs]}
    last = node
    for at, output in enumerate(region.outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (node, at))
        last.meta = dict(output.meta)
        output.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for old in reversed(region.nodes):
        if not old.users:
            graph.erase_node(old)
