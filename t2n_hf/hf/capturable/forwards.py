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
from transformers.masking_utils import create_bidirectional_mask

from t2n_hf.trace.function_variants import in_scope, without_asserts
from t2n_hf.trace.swap import attributes_replaced, methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_forwards"]


@contextmanager
def capturable_forwards(model: nn.Module) -> Iterator[None]:
    """Let the models in `model`, and itself, run without such questions; after any exit all is as before."""
    with ExitStack() as stack:
        for module in modules_of(model):
            methods = _rewritten(type(module)) if isinstance(module, PreTrainedModel) else {}  # type: ignore[arg-type]
            # What was replaced already knows better (a codec's `decode`).
            methods = {
                name: method for name, method in methods.items() if name == "forward" or name not in vars(module)
            }
            if methods:
                stack.enter_context(methods_replaced(module, methods))
            asked = {name: module._buffers[name] for name in _ASKED if name in module._buffers}
            if asked:
                numbers = {name: buffer.tolist() for name, buffer in asked.items() if buffer is not None}
                stack.enter_context(attributes_replaced(module, numbers))
        yield


@cache
def _rewritten(kind: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
    """Methods of a class as they can be captured: its forward, and those it calls; none when its own ones can."""
    inner = inspect.unwrap(kind.forward)
    if not isinstance(inner, FunctionType):
        return {}
    called, forward = inner.__code__.co_names, kind.forward
    if "item" in called:  # the number of a tensor, which asserts are about
        forward = without_asserts(forward)
    names = {name: function for name, function in _FUNCTIONS.items() if name in called}
    names |= {name: function for name, function in _OF_CLASSES.get(kind.__name__, {}).items() if name in called}
    for name, others in _IN_FUNCTIONS.items():
        if name in called:
            names[name] = in_scope(inner.__globals__[name], others)
    forward = in_scope(forward, names) if names else forward
    methods = {name: in_scope(getattr(kind, name), _FUNCTIONS) for name in called if _measures(kind, name)}
    return methods if forward is kind.forward else {**methods, "forward": forward}


def _measures(kind: type[nn.Module], name: str) -> bool:
    """Whether a name is that of a method of the class itself, not of transformers' own ones, which takes lengths."""
    method = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
    own = isinstance(method, FunctionType) and not hasattr(PreTrainedModel, name)
    return own and not set(_FUNCTIONS).isdisjoint(method.__code__.co_names)


def _length(value: Any) -> Any:  # noqa: ANN401 - what `len` takes; a number, or a symbol of one
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


def _padding_mask(input_ids: torch.Tensor, padding_idx: int = 1) -> torch.Tensor:
    """Where padding is, [B, S] bool; FSMT's own gives None when there is none."""
    return input_ids.eq(padding_idx)


def _mask_if_given(*, attention_mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor | None:  # noqa: ANN401 - transformers' own
    """A mask of what is padded; none where nothing says so, as transformers has it when it is not captured."""
    return None if attention_mask is None else create_bidirectional_mask(attention_mask=attention_mask, **others)


# Buffers that forwards decide by: how likely EoMT's layers use their masks in training, 1 for always.
_ASKED: Final = ("attn_mask_probs",)
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"len": _length}
# Autoformer correlates sequences by their frequencies, which no mask fits.
_OF_CLASSES: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    name: {"create_bidirectional_mask": _mask_if_given} for name in ("AutoformerDecoder", "AutoformerEncoder")
}
# Functions that a forward calls, and those that these call.
_IN_FUNCTIONS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "_prepare_fsmt_decoder_inputs": {"make_padding_mask": _padding_mask},
}
