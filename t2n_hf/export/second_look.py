"""A graph of a user's own code that nothing will check is captured again, in another way, and has to be the same.

What is captured of code depends on more than a capture can see: how often the code ran before, or what a layer is when
the model asks for more than its attributes. PyTorch's results would tell, and are not asked for with `check=False`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import Graph, make_graph
from t2n_hf.export.module_interface import run_on_shapes
from t2n_hf.nnef.meaning import meaning_of
from t2n_hf.trace.digest import digest_of
from t2n_hf.trace.flat import flatten_interface
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.pieces import is_library_code
from t2n_hf.trace.undo import undo_of
from t2n_hf.trace.walk import modules_of

__all__ = ["graph_of"]


def graph_of(interface: Interface, config: ExportConfig) -> Graph:
    """See `make_graph`. Without a check, a user's own code has to give the same graph again.

    With capture="auto" layers that are other pieces than they are in place are captured in place.

    Raises CaptureError also for code whose graph depends on what it keeps from call to call.
    """
    graph = make_graph(interface, config)
    if config.check or is_library_code(interface.module):
        return graph
    other = _again(interface, config, graph)
    if (line := _difference(graph, other)) is None:
        return graph
    if not graph.fixed_shapes and config.capture in ("auto", "pieces"):
        unlike = _difference(other, _again(interface, config, graph))
        if unlike is None and config.capture == "auto":
            return other
        if unlike is None:
            raise CaptureError(
                f"{_name(interface)} captured whole has another graph than captured in pieces ({line}), so that its "
                "layers may do what pieces do not show. Have it checked (check=True), or capture='auto'"
            )
        line = unlike
    raise CaptureError(
        f"{_name(interface)} has another graph each time that it is captured ({line}): what it gives depends on what "
        "it keeps from call to call, such as a count of its calls; an archive keeps nothing. Make it an input and an "
        "output"
    )


def _name(interface: Interface) -> str:
    return type(interface.weight_owner).__name__


def _again(interface: Interface, config: ExportConfig, graph: Graph) -> Graph:
    """Another graph of the same code, after one more call of it: in place where that can be, to compare layers too."""
    undo = undo_of(modules_of(interface.module))
    _call_once_more(interface)
    try:
        return _in_place(interface, config, graph)  # a later look is to find what that call left behind
    except CaptureError:
        undo()  # perhaps it is refused because of that
    try:
        return _in_place(interface, config, graph)
    except CaptureError:
        return make_graph(interface, config)


def _in_place(interface: Interface, config: ExportConfig, graph: Graph) -> Graph:
    return make_graph(interface, replace(config, capture="dispatch" if graph.fixed_shapes else "whole"))


def _call_once_more(interface: Interface) -> None:
    """Call the module as its example does, at twice the free lengths: it may keep a result for the next such call."""
    example = (tuple(interface.args), dict(interface.kwargs))
    dims = iter(flatten_interface(interface, torch.float32).dims)
    longer = pytree.tree_map_only(torch.Tensor, lambda tensor: _twice(tensor, next(dims)), example)
    with interface.context():
        for args, kwargs in (longer, example):  # there may be no such lengths
            with suppress(Exception):  # what asks for values does not run on shapes
                run_on_shapes(interface.module, args, kwargs)
                return


def _twice(tensor: torch.Tensor, free: Mapping[int, Any]) -> torch.Tensor:
    shape = [length * 2 if free.get(axis) is not None else length for axis, length in enumerate(tensor.shape)]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _difference(graph: Graph, other: Graph) -> str | None:
    """The first line that differs, of two that compute something else; None of two that compute the same."""
    if _meaning(graph) == _meaning(other):
        return None
    lines = zip_longest(graph.text.splitlines(), other.text.splitlines(), fillvalue="")
    unlike = (f"{mine.strip()!r}, {line.strip()!r}" for mine, line in lines if mine != line)
    return next(unlike, "in the values of a constant")


def _meaning(graph: Graph) -> str:
    stored = {label: f"{value.dtype} {digest_of(value)}" for label, value in graph.constants.items()}
    return meaning_of(graph.document, stored)
