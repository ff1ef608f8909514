"""What a capture gives: a graph of the whole model, and one graph for each kind of repeated layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

__all__ = ["Captured", "CapturedGraph", "Piece", "PieceCall"]


@dataclass(kw_only=True)
class CapturedGraph:
    """A graph of ATen calls. Each node's `meta["val"]` is a fake tensor, or a symbolic or plain number.

    Attributes:
        graph: placeholders, calls and one output.
        inputs: the placeholders that are inputs, in order, with their names.
        outputs: the nodes that are results, in order, with their names. One node may have several names.
        weights: placeholder -> name of the parameter or buffer. In a piece the name is relative to the layer.
        constants: placeholder or attribute node -> its values.
        constant_names: the same nodes -> a name. In a piece it is that of the layer that was traced.
    """

    graph: fx.Graph
    inputs: list[tuple[fx.Node, str]]
    outputs: list[tuple[fx.Node, str]]
    weights: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    constant_names: dict[fx.Node, str]


@dataclass(kw_only=True)
class Piece(CapturedGraph):
    """One kind of layer. `name` says its class ("llama_decoder_layer"), `where` the layer that was traced."""

    name: str
    where: str


@dataclass(frozen=True)
class PieceCall:
    """One layer: `piece` is an index into `Captured.pieces`, `prefix` its name, and a dot, among the weights."""

    piece: int
    prefix: str


@dataclass(kw_only=True)
class Captured(CapturedGraph):
    """A whole model.

    Attributes:
        symbols: symbol in the shapes -> its name. Pieces use the same symbols.
        pieces: the kinds of layers.
        calls: what the first argument of a call of `t2n_hf::layer` in `graph` stands for.
        canonical: name of a weight -> the one name of its object (tied weights have several names).
        notes: why layers could not be captured as pieces.
        asserts: facts about the symbols, from the interface.
        fixed_shapes: whether the graph holds for the lengths of the example alone, because torch.export refuses it.
        reads: what the model asked of values that come from its inputs while it was captured, and what it was told: the
            graph holds for inputs that answer the same.
    """

    symbols: dict[sympy.Symbol, str]
    pieces: list[Piece] = field(default_factory=list)
    calls: dict[int, PieceCall] = field(default_factory=dict)
    canonical: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    asserts: tuple[str, ...] = ()
    fixed_shapes: bool = False
    reads: tuple[str, ...] = ()
