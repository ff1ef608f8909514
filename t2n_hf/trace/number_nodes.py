"""Numbers that depend on lengths, as nodes of a graph that compute them."""
# ruff: noqa: ANN401 - proxies stand for numbers of every type

import math
import operator
from collections.abc import Mapping
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


def _call(function: Any, *args: Any) -> Any:
    proxy = next(arg for arg in args if isinstance(arg, fx.Proxy))
    return proxy.tracer.create_proxy("call_function", function, args, {})


class _Calls(PythonReferenceAnalysis):
    """What torch's own leaves to sympy, or to methods that no number has, as calls of functions."""

    int_truediv: Final = staticmethod(operator.truediv)

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_float, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(round, x)

    @staticmethod
    def sqrt(x: Any) -> Any:
        return _call(torch.sym_sqrt, x)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return _call(torch.sym_min, a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return _call(torch.sym_max, a, b)
