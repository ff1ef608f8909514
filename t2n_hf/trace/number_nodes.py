"""Numbers that depend on lengths, as nodes of a graph that compute them."""
# ruff: noqa: ANN401 - proxies stand for numbers of every type

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from t2n_hf.errors import CaptureError

__all__ = ["number_nodes"]


def number_nodes(expression: sympy.Expr, known: Mapping[sympy.Symbol, fx.Proxy]) -> fx.Node:
    """Add nodes that compute `expression`, and give the last one. `known` has a proxy of each of its symbols.

    Every new node has a `SymInt`, `SymFloat` or `SymBool` in `meta["val"]`.

    Raises:
        CaptureError: the expression has an operation that a graph does not call.
    """
    graph = next(iter(known.values())).node.graph
    before = len(graph.nodes)
    try:
        computed = sympy_interp(_Calls, dict(known), expression)
        for node in list(graph.nodes)[before:]:
            compute: Any = node.target
            node.meta["val"] = compute(*fx.map_arg(node.args, lambda arg: arg.meta["val"]))
    except Exception as error:
        raise CaptureError(
            f"a number of the traced function is {expression}, which a graph cannot compute ({error}); compute it "
            "before, or trace at fixed lengths"
        ) from error
    return computed.node


def _calling(function: Callable[..., Any], arguments: int) -> Any:
    """A method that adds a call of `function` with its first arguments; a dtype that sympy gives after them is not."""

    def call(*given: Any) -> Any:
        proxy = next(value for value in given if isinstance(value, fx.Proxy))
        return proxy.tracer.create_proxy("call_function", function, given[:arguments], {})

    return staticmethod(call)


class _Calls(PythonReferenceAnalysis):
    """What torch's own leaves to sympy, or to methods that no number has, as calls of functions."""

    int_truediv: Final = staticmethod(operator.truediv)
    to_dtype: Final = _calling(torch.sym_float, 1)
    floor_to_int: Final = _calling(math.floor, 1)
    ceil_to_int: Final = _calling(math.ceil, 1)
    trunc_to_int: Final = _calling(math.trunc, 1)
    round_to_int: Final = _calling(round, 1)
    sqrt: Final = _calling(torch.sym_sqrt, 1)
    minimum: Final = _calling(torch.sym_min, 2)
    maximum: Final = _calling(torch.sym_max, 2)
