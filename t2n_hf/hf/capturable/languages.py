"""Adapters of which each language has its own (X-MOD), in a form that can be captured.

Its code takes the rows of one language after the other, whose number depends on the data. Without `lang_ids` all rows
are of the default language; while such a model is captured only that one's adapter runs. With them all adapters run on
all rows, and each row keeps what its own gives.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_languages"]

_ADAPTED: Final = "XmodOutput"


@contextmanager
def capturable_languages(model: nn.Module) -> Iterator[None]:
    """Let the adapters of `model` run without asking whose rows there are; after any exit all is as before."""
    default = getattr(getattr(model, "config", None), "default_language", None)
    with ExitStack() as stack:
        for module in modules_of(model):
            if type(module).__name__ == _ADAPTED:
                stack.enter_context(methods_replaced(module, {"lang_adapter": partial(_adapted, default=default)}))
        yield


def _adapted(
    self: Any,  # noqa: ANN401 - a class of transformers
    lang_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    *,
    default: str | None,
) -> torch.Tensor:
    """States [B, S, width]; numbers of languages [B] or [B, S]."""
    norm = self.adapter_layer_norm or (self.LayerNorm if self.adapter_reuse_layer_norm else nn.Identity())
    normed = norm(hidden_states)
    residual = normed if self.ln_before_adapter else hidden_states
    return self.dropout(_of_languages(self.adapter_modules, lang_ids, normed, default)) + residual


def _of_languages(
    adapters: nn.ModuleDict, lang_ids: torch.Tensor, states: torch.Tensor, default: str | None
) -> torch.Tensor:
    # What a caller gives are whole numbers; what the model makes of its default language are floats.
    if default is not None and lang_ids.is_floating_point():
        adapted: torch.Tensor = adapters[default](states)
        return adapted
    rows = lang_ids.reshape(*lang_ids.shape, *[1] * (states.ndim - lang_ids.ndim))
    result = torch.zeros_like(states)
    for number, adapter in enumerate(adapters.values()):
        result = torch.where(rows == number, adapter(states), result)
    return result
