"""Names for tensors that a forward makes of numbers, which no module has as an attribute."""

import itertools
import re
from collections.abc import Iterable
from typing import Final

from t2n_hf.trace.captured import CapturedGraph, Piece

__all__ = ["name_inline_constants"]

# How torch.export and make_fx call them, numbered through all that they trace.
_INLINE: Final = re.compile(r"(_tensor_constant|lifted_tensor_)\d+")


def name_inline_constants(graphs: Iterable[CapturedGraph]) -> None:
    """Call them `constant_<number>` of the module that makes them, the same way however they were captured."""
    graphs = list(graphs)
    taken = {name for graph in graphs for name in graph.constant_names.values()}
    for graph in graphs:
        inside = f"{graph.where}." if isinstance(graph, Piece) else ""
        taken |= {f"{inside}{name}" for name in graph.weights.values()}
    for graph in graphs:
        for node in graph.constants:
            name = graph.constant_names[node]
            module, dot, last = name.rpartition(".")
            if _INLINE.fullmatch(last):
                names = (f"{module}{dot}constant_{number}" for number in itertools.count())
                graph.constant_names[node] = unused = next(each for each in names if each not in taken)
                taken.add(unused)
