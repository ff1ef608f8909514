"""Calls that ask for lengths."""

from typing import Final

import torch
from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["free_lengths"]

_LENGTHS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def _length() -> int:
    raise RuntimeError("stands for a length, which its meta tells; a graph with it cannot be executed")


def free_lengths(graph: fx.Graph) -> PassResult:
    """Let lengths depend on nothing: what they are is in their meta, and nothing is to be kept for its shape."""
    changed = False
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not _length and isinstance(node.meta.get("val"), _LENGTHS):
            node.target, node.args, node.kwargs = _length, (), {}
            changed = True
    return PassResult(graph, changed)
