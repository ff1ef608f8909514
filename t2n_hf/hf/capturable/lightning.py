"""Lightning attention (Qin et al. 2024; MiniMax), which walks by blocks from nothing, and by tokens from a state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import LayerStates
from t2n_hf.ops.state_space import gated_scan
from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_lightning", "minimax_states"]

_ATTENTION: Final = "MiniMaxLightningAttention"


@contextmanager
def capturable_lightning(model: nn.Module) -> Iterator[None]:
    """Let lightning attention walk by one operator, from the state of its cache; all is as before after any exit."""
    with ExitStack() as stack:
        for module in modules_of(model):
            if type(module).__name__ == _ATTENTION:
                stack.enter_context(methods_replaced(module, {"forward": _in_one_walk}))
        yield


def _in_one_walk(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,  # noqa: ANN401 - not used
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,  # noqa: ANN401 - any cache
    **kwargs: Any,  # noqa: ANN401 - what attention takes
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward`; hidden states are [B, S, W], the state is [B, heads, D, D]."""
    cache = kwargs.get("past_key_values") if cache is None else cache
    rows, length, _ = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    parts = qkv.reshape(rows, length, self.num_attention_heads, 3 * self.head_dim).split(self.head_dim, dim=3)
    query, key, value = (part.float().transpose(0, 1) for part in parts)
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    if state is None:
        state = key.new_zeros(rows, self.num_attention_heads, self.head_dim, self.head_dim)
    # The state loses as much at each step, which is said by a rate and steps of length 1.
    steps = torch.ones_like(query[..., :1, :1])
    read, last = gated_scan(
        query.unsqueeze(-1), key.unsqueeze(-1), value.unsqueeze(-2), steps.unsqueeze(-1), state.float(), 2,
        -self.slope_rate.float().unsqueeze(0),
    )  # fmt: skip
    output = self.norm(read.transpose(0, 1).reshape(rows, length, -1).to(hidden_states.dtype))
    output = self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * output)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, last.to(state.dtype))
    return output, last


def minimax_states(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each layer keeps: a state, or keys and values."""
    config = model.config.get_text_config(decoder=True)
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    keys = (1, config.num_key_value_heads, 0, width)
    state = LayerStates(recurrent=((0, (1, config.num_attention_heads, width, width)),))
    kinds = {"linear_attention": state, "full_attention": LayerStates((keys, keys))}
    return tuple(kinds[kind] for kind in config.layer_types)
