"""Indexes of sparse attention, which choose the tokens that are seen, in a form that can be captured at every length.

They choose a number of tokens, or all there are, by the `min` of Python: which of the two fixes a free length. While a
model is captured they run with torch's `min` of symbols.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from t2n_hf.trace.function_variants import in_scope
from t2n_hf.trace.swap import methods_replaced_by_class

__all__ = ["capturable_indexers"]


def capturable_indexers(model: nn.Module) -> AbstractContextManager[None]:
    """Let the indexes in `model` choose at every length; all modules are as before after any exit."""
    return methods_replaced_by_class(model, _methods)


@cache
def _methods(kind: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
    """The forward of an index, for all modules of its class, so that layers are alike; none for any other class."""
    inner = inspect.unwrap(kind.forward)
    if not kind.__name__.endswith("Indexer") or not isinstance(inner, FunctionType):
        return {}
    chooses = {"min", "topk"} <= set(inner.__code__.co_names)
    return {"forward": in_scope(kind.forward, {"min": _least})} if chooses else {}


def _least(*numbers: Any) -> Any:  # noqa: ANN401 - what `min` takes; a number, or a symbol of one
    first, *others = numbers
    for other in others:
        first = torch.sym_min(first, other)
    return first if others else min(first)
