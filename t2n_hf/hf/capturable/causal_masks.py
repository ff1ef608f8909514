"""Decoders that forget their causal mask as soon as they keep a cache (FSMT): right for one token of each call alone.

Here its decoder gets the mask of the tokens of a call after those of the past.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["causal_with_cache"]

_FORGETFUL: Final = "FSMTDecoder"


@contextmanager
def causal_with_cache(model: nn.Module) -> Iterator[None]:
    """Let the tokens of one call not see each other's future in `model`; all modules are as before after any exit."""
    with ExitStack() as stack:
        for module in modules_of(model):
            if type(module).__name__ == _FORGETFUL:
                stack.enter_context(methods_replaced(module, {"forward": _masked}))
        yield


def _masked(
    self: nn.Module,
    input_ids: torch.Tensor,
    *args: Any,  # noqa: ANN401 - what the decoder takes
    decoder_causal_mask: torch.Tensor | None = None,
    cache: Any = None,  # noqa: ANN401 - a cache of transformers
    **kwargs: Any,  # noqa: ANN401 - what the decoder takes
) -> Any:  # noqa: ANN401 - what the decoder gives
    """Tokens [B, S]; the mask is [S, P + S], 0 where a token sees another."""
    if decoder_causal_mask is None and cache is not None and input_ids is not None:
        past = cache.get_seq_length()
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] + past
        columns = torch.arange(input_ids.shape[1] + past, device=input_ids.device)
        kind = next(self.parameters()).dtype
        least = torch.finfo(kind).min
        decoder_causal_mask = torch.zeros((), dtype=kind).masked_fill(columns > rows, least)
    forward: Any = type(self).forward
    return forward(self, input_ids, *args, decoder_causal_mask=decoder_causal_mask, cache=cache, **kwargs)
