"""What lowering takes and gives: formats of weights, missing operators, bindings of variables, the document."""

from dataclasses import dataclass

import torch

from t2n_hf.nnef.ir import Document

__all__ = ["Lowered", "MissingOp", "WeightBinding", "WeightFormatInfo"]


@dataclass(frozen=True)
class WeightFormatInfo:
    """How a weight is stored: "dense" or a block format; `transposed` when its last two axes are stored swapped."""

    format: str = "dense"
    transposed: bool = False


@dataclass(frozen=True)
class MissingOp:
    """An operator that no emitter covers, where the model uses it, and why there is no emitter where that is known."""

    op: str
    module: str
    source_line: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightBinding:
    """A variable of the document and where its values come from.

    Attributes:
        label: name of its `.dat` file, without the ending.
        name: name in the graph.
        fqn: name of the weight in the model; None for a constant of the graph, whose values are in `value`.
        shape: as stored.
        format: "dense" or a block format.
        transposed: the stored axes are those of the model with the last two swapped.
        value: values of a constant, to be written as they are.
        reason: why a weight that has a block format must be written dense.
    """

    label: str
    name: str
    fqn: str | None
    shape: tuple[int, ...]
    format: str = "dense"
    transposed: bool = False
    value: torch.Tensor | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Lowered:
    """The document, and one binding for each of its variables, in order."""

    document: Document
    bindings: list[WeightBinding]
