"""RWKV (Peng et al. 2023), which has its state in a list and halves weights in place when it first runs in inference.

While it is captured its blocks keep their state in a cache, and walk along a sequence by one operator. `unscaled_rwkv`
lets the model run without a change of its weights: what comes out of them is divided instead, which gives the same
numbers, as the divisors are powers of two.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import LayerStates, StateCache
from t2n_hf.ops.state_space import wkv_scan
from t2n_hf.trace.swap import attributes_replaced, methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_rwkv", "rwkv_list", "rwkv_states", "unscaled_rwkv"]

_MODEL: Final = "RwkvModel"
# A peak so low that all that was before it counts for nothing.
_NOTHING_SEEN: Final = -1e38
# Numbers of what a block keeps, in the order of transformers' list: last inputs, then sums and the largest exponent.
_OF_FEEDING, _OF_MIXING = 0, 1
_SUMS: Final = (0, 1, 2)


@contextmanager
def unscaled_rwkv(model: nn.Module) -> Iterator[None]:
    """Let an RWKV in `model` run in inference with the weights that it has now; it is as before after any exit.

    A model whose weights are divided already, as it has run before, keeps them; other models are not touched.
    """
    with ExitStack() as stack:
        for rwkv in modules_of(model):
            if type(rwkv).__name__ != _MODEL or rwkv.layers_are_rescaled:
                continue
            every: int = rwkv.config.rescale_every  # type: ignore[union-attr, assignment]
            stack.enter_context(attributes_replaced(rwkv, {"layers_are_rescaled": True}))
            for number, block in enumerate(rwkv.blocks if every > 0 else ()):  # type: ignore[arg-type]
                for linear in (block.attention.output, block.feed_forward.value) if number >= every else ():
                    stack.callback(linear.register_forward_hook(_dividing(2 ** (number // every))).remove)
        yield


def _dividing(divisor: int) -> Callable[..., torch.Tensor]:
    return lambda _module, _inputs, result: result / divisor


@contextmanager
def capturable_rwkv(model: nn.Module) -> Iterator[None]:
    """Let the blocks of an RWKV go on from the states of the cache that they are given as `state`, or from nothing."""
    with unscaled_rwkv(model), ExitStack() as stack:
        for rwkv in modules_of(model):
            if type(rwkv).__name__ != _MODEL:
                continue
            for number, block in enumerate(rwkv.blocks):  # type: ignore[arg-type]
                # Blocks are alike but for their number, of which they only ask whether it is 0.
                stack.enter_context(attributes_replaced(block, {"layer_id": min(number, 1), "layer_idx": number}))
                for part, forward in ((block.attention, _mix), (block.feed_forward, _feed)):
                    stack.enter_context(attributes_replaced(part, {"layer_id": 0, "layer_idx": number}))
                    stack.enter_context(methods_replaced(part, {"forward": forward}))
        yield


@final
class _Listed:
    """The list of transformers, [B, H, layers] each, by the names that a cache has for what it does."""

    def __init__(self, state: list[torch.Tensor]) -> None:
        self._state = state

    def update_conv_state(self, inputs: torch.Tensor, layer: int, number: int) -> torch.Tensor:
        kept = self._state[number]
        before = kept[:, :, layer : layer + 1].clone()
        kept[:, :, layer] = inputs[..., -1]
        return torch.cat([before, inputs], dim=-1)

    def get_recurrent_state(self, layer: int, number: int) -> torch.Tensor:
        return self._state[2 + number][:, :, layer]

    def update_recurrent_state(self, tensor: torch.Tensor, layer: int, number: int) -> None:
        self._state[2 + number][:, :, layer] = tensor


def _cache(state: Any) -> Any:  # noqa: ANN401 - a cache, or a list
    return _Listed(state) if isinstance(state, list) else state


def _before(part: Any, hidden: torch.Tensor, state: Any, number: int) -> torch.Tensor:  # noqa: ANN401 - foreign classes
    """What came before each position of `hidden` [B, S, H]."""
    if state is None:
        return F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    inputs = _cache(state).update_conv_state(hidden.transpose(1, 2), part.layer_idx, number)
    return inputs[..., :-1].transpose(1, 2)


def _blend(hidden: torch.Tensor, before: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return hidden * share + before * (1 - share)


def _mix(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden: torch.Tensor,
    state: Any = None,  # noqa: ANN401 - any cache
    use_cache: bool = False,
) -> tuple[torch.Tensor, Any]:
    """`RwkvSelfAttention.forward`."""
    before = _before(self, hidden, state, _OF_MIXING)
    key = self.key(_blend(hidden, before, self.time_mix_key)).float().transpose(0, 1)
    value = self.value(_blend(hidden, before, self.time_mix_value)).float().transpose(0, 1)
    receptance = torch.sigmoid(self.receptance(_blend(hidden, before, self.time_mix_receptance)))
    if state is None:
        top = bottom = torch.zeros_like(key[0])
        peak = top + _NOTHING_SEEN
    else:
        top, bottom, peak = (_cache(state).get_recurrent_state(self.layer_idx, n).float() for n in _SUMS)
        # A state of zeros has seen nothing: the weight of what was seen is never 0.
        peak = torch.where(bottom == 0, _NOTHING_SEEN, peak)
    means, *last = wkv_scan(key, value, -torch.exp(self.time_decay.float()), self.time_first.float(), top, bottom, peak)
    if state is not None:
        for number, tensor in zip(_SUMS, last, strict=True):
            _cache(state).update_recurrent_state(tensor, self.layer_idx, number)
    return self.output(receptance * means.transpose(0, 1).to(hidden.dtype)), state


def _feed(self: Any, hidden: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:  # noqa: ANN401 - as above
    """`RwkvFeedForward.forward`."""
    before = _before(self, hidden, state, _OF_FEEDING)
    key = torch.square(torch.relu(self.key(_blend(hidden, before, self.time_mix_key))))
    receptance = torch.sigmoid(self.receptance(_blend(hidden, before, self.time_mix_receptance)))
    return receptance * self.value(key), state


def rwkv_states(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each block keeps."""
    config = model.config
    inputs, sums = (1, config.hidden_size, 1), (1, config.attention_hidden_size)
    states = LayerStates(
        convolutions=((_OF_FEEDING, inputs), (_OF_MIXING, inputs)),
        recurrent=tuple((number, sums) for number in _SUMS),
    )
    return (states,) * config.num_hidden_layers


@contextmanager
def rwkv_list(cache: StateCache) -> Iterator[list[torch.Tensor]]:
    """The list that transformers takes and writes to; the cache has what is in it when the block ends."""
    layers: list[Any] = cache.layers
    listed = [torch.stack([layer.conv_states[n][..., 0] for layer in layers], -1) for n in (_OF_FEEDING, _OF_MIXING)]
    listed += [torch.stack([layer.recurrent_states[n].float() for layer in layers], -1) for n in _SUMS]
    listed[4] = torch.where(listed[3] == 0, _NOTHING_SEEN, listed[4])
    yield listed
    for at, layer in enumerate(layers):
        for number in (_OF_FEEDING, _OF_MIXING):
            layer.conv_states[number] = listed[number][:, :, at : at + 1]
        for number in _SUMS:
            layer.recurrent_states[number] = listed[2 + number][:, :, at]
