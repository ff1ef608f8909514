"""A part of an export: one graph, its weights, its archive."""

from dataclasses import dataclass

from t2n_hf.export.graph import Graph
from t2n_hf.trace.interface import Interface

__all__ = ["Part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One graph of a model: `archive` is the name of its file or folder in the export folder."""

    name: str
    interface: Interface
    graph: Graph
    archive: str

    @property
    def weight_bytes(self) -> int:
        """Size of all its `.dat` files."""
        return sum(weight.nbytes for weight in self.graph.weights)
