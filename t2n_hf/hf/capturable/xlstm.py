"""xLSTM (Beck et al. 2024), whose cells walk in fixed chunks and then token by token, from states in a dictionary."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import LayerStates, StateCache
from t2n_hf.ops.state_space import mlstm_scan
from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["XlstmStates", "capturable_xlstm", "xlstm_states"]

_CELLS: Final = "xLSTMBackend"
_STATES: Final = (0, 1, 2)  # numbers of memory, normalizer and largest exponent


@final
class _NoLimit(int):
    """A number that no length is beyond; a comparison with one would be a condition that the capture has to prove."""

    def __lt__(self, other: object) -> bool:
        return False


@final
class XlstmStates:
    """The states of a cache as xLSTM takes them, which writes to their tensors in place.

    Attributes:
        rnn_state: number of a layer -> its states.
        seqlen_offset: counted by the model, and used by nobody.
    """

    def __init__(self, cache: StateCache) -> None:
        layers: list[Any] = cache.layers
        self.rnn_state = {at: tuple(layer.recurrent_states[n] for n in _STATES) for at, layer in enumerate(layers)}
        self.seqlen_offset: Any = 0


@contextmanager
def capturable_xlstm(model: nn.Module) -> Iterator[None]:
    """Let cells walk by one operator, however long the sequence is; all is as before after any exit."""
    with ExitStack() as stack:
        for module in modules_of(model):
            if type(module).__name__ == _CELLS:
                config: Any = module.config
                # Longer texts are run in parts, to the same result.
                stack.callback(setattr, config, "max_inference_chunksize", config.max_inference_chunksize)
                config.max_inference_chunksize = _NoLimit()
                stack.enter_context(methods_replaced(module, {"forward": _in_one_walk}))
        yield


def _in_one_walk(  # noqa: PLR0917 - the signature that callers know
    self: Any,  # noqa: ANN401 - a class of transformers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    c_initial: torch.Tensor | None = None,
    n_initial: torch.Tensor | None = None,
    m_initial: torch.Tensor | None = None,
    **_ignored: Any,  # noqa: ANN401 - which kernels to use
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """`forward`: query and key [B, H, S, K], value [B, H, S, V], gates [B, H, S], states as `mlstm_scan` has them."""
    queries, keys, values = (x.float().movedim(2, 0) for x in (query * query.shape[-1] ** -0.5, key, value))
    inputs, forgets = (x.float().movedim(2, 0).unsqueeze(-1) for x in (igate, F.logsigmoid(fgate)))
    memory, normalizer, peak = (None if x is None else x.float() for x in (c_initial, n_initial, m_initial))
    if memory is None or normalizer is None or peak is None:
        normalizer = torch.zeros_like(keys[0])
        memory, peak = normalizer.unsqueeze(-1) * values[0].unsqueeze(-2), torch.zeros_like(inputs[0])
    outputs, *last = mlstm_scan(queries, keys, values, inputs, forgets, memory, normalizer, peak, self.config.eps)
    return outputs.movedim(0, 2).to(query.dtype), tuple(last)


def xlstm_states(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each block keeps. The config of transformers rounds the size of a head up, the blocks do not."""
    found = []
    for block in model.base_model.blocks:  # type: ignore[union-attr]
        layer, heads = block.mlstm_layer, model.config.num_heads
        keys, values = layer.qk_dim // heads, layer.v_dim // heads
        found.append(LayerStates(recurrent=((0, (1, heads, keys, values)), (1, (1, heads, keys)), (2, (1, heads, 1)))))
    return tuple(found)
