"""Forwards of models that ask Python for what only a run knows, in a form that can be captured.

`len()` of a tensor must be a number in Python, which fixes a free length; an assert about values of tensors has to know
them; and some leave out a mask of no padding, which they look at its values for, or decide by a buffer. While a model
is captured, its own code runs with other functions under these names, without its asserts, and with the numbers that
such a buffer holds; nothing else changes.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.trace.function_variants import in_scope, without_asserts
from t2n_hf.trace.swap import attributes_replaced, methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_forwards"]


@contextmanager
def capturable_forwards(model: nn.Module) -> Iterator[None]:
    """Let the models in `model`, and itself, run without such questions; after any exit all is as before."""
    with ExitStack() as stack:
        for module in modules_of(model):
            forward = _rewritten(type(module)) if isinstance(module, PreTrainedModel) else None  # type: ignore[arg-type]
            if forward is not None:
                stack.enter_context(methods_replaced(module, {"forward": forward}))
            asked = {name: module._buffers[name] for name in _ASKED if name in module._buffers}
            if asked:
                numbers = {name: buffer.tolist() for name, buffer in asked.items() if buffer is not None}
                stack.enter_context(attributes_replaced(module, numbers))
        yield


@cache
def _rewritten(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The forward of a class as it can be captured; None when its own one can."""
    inner = inspect.unwrap(kind.forward)
    if not isinstance(inner, FunctionType):
        return None
    called, forward = inner.__code__.co_names, kind.forward
    if "item" in called:  # the number of a tensor, which asserts are about
        forward = without_asserts(forward)
    names = {name: function for name, function in _FUNCTIONS.items() if name in called}
    for name, others in _IN_FUNCTIONS.items():
        if name in called:
            names[name] = in_scope(inner.__globals__[name], others)
    forward = in_scope(forward, names) if names else forward
    return None if forward is kind.forward else forward


def _length(value: Any) -> Any:  # noqa: ANN401 - what `len` takes; a number, or a symbol of one
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


def _padding_mask(input_ids: torch.Tensor, padding_idx: int = 1) -> torch.Tensor:
    """Where padding is, [B, S] bool; FSMT's own gives None when there is none."""
    return input_ids.eq(padding_idx)


# Buffers that forwards decide by: how likely EoMT's layers use their masks in training, 1 for always.
_ASKED: Final = ("attn_mask_probs",)
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"len": _length}
# Functions that a forward calls, and those that these call.
_IN_FUNCTIONS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "_prepare_fsmt_decoder_inputs": {"make_padding_mask": _padding_mask},
}
