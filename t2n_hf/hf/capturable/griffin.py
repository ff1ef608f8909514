"""Griffin's recurrent blocks (De et al. 2024; RecurrentGemma) keep their states in themselves: here the cache does.

`griffin_states` lets the blocks of transformers work on the states of a cache, `capturable_griffin` lets them walk
along a sequence by one operator, at every length and from any state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.ops.state_space import linear_scan
from t2n_hf.trace.swap import attributes_replaced, methods_replaced
from t2n_hf.trace.walk import attribute_of, modules_of

__all__ = ["capturable_griffin", "griffin_states", "has_griffin"]

_BLOCK: Final = "RecurrentGemmaRecurrentBlock"


def has_griffin(model: nn.Module) -> bool:
    """Whether `model` has such blocks."""
    return any(_blocks(model))


@contextmanager
def griffin_states(model: nn.Module) -> Iterator[None]:
    """Let each block, as it is, begin with the states of the cache that it is given, and put them back there."""
    with _replaced(model, _as_it_is, {}):
        yield


@contextmanager
def capturable_griffin(model: nn.Module) -> Iterator[None]:
    """Let each block go on from the states of the cache that it is given, however many tokens there are."""
    with _replaced(model, _in_one_walk, {"_rnn_scan": _walk}):
        yield


def _blocks(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """The blocks, with the numbers of their layers."""
    for module in modules_of(model):
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                # A list may have gaps: Informer's convolutions between its layers.
                block = attribute_of(layer, "temporal_block") if isinstance(layer, nn.Module) else None
                if type(block).__name__ == _BLOCK:
                    yield number, block


@contextmanager
def _replaced(
    model: nn.Module, forward: Callable[..., Any], of_units: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Give blocks and their recurrent units other methods, and blocks their number; all is taken back at any exit."""
    with ExitStack() as stack:
        for number, block in _blocks(model):
            unit: Any = block.rg_lru
            stack.enter_context(attributes_replaced(block, {"layer_idx": number}))
            stack.enter_context(methods_replaced(block, {"forward": forward}))
            stack.enter_context(methods_replaced(unit, of_units))
        yield


def _states(block: Any, cache: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - foreign classes
    """Last inputs of the convolution [B, W, K-1] and the recurrent state [B, W]; zeros when nothing was seen."""
    inputs = cache.get_conv_state(block.layer_idx)
    state = cache.get_recurrent_state(block.layer_idx)
    rows, width = like.shape[0], block.lru_width
    if inputs is None:
        inputs = like.new_zeros(rows, width, block.conv1d_width - 1)
    return inputs, like.new_zeros(rows, width, dtype=torch.float32) if state is None else state


def _as_it_is(
    self: Any,  # noqa: ANN401 - a class of transformers
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    use_cache: bool = True,
    cache: Any = None,  # noqa: ANN401 - any cache
    **kwargs: Any,  # noqa: ANN401 - what the block takes
) -> Any:  # noqa: ANN401 - what the block gives
    self.conv1d_state, self.rg_lru.recurrent_states = _states(self, cache, input_states)
    result = type(self).forward(self, input_states, position_ids, attention_mask, use_cache, **kwargs)
    layer = cache.layers[self.layer_idx]
    layer.conv_states[0], layer.recurrent_states[0] = self.conv1d_state, self.rg_lru.recurrent_states
    self.conv1d_state = self.rg_lru.recurrent_states = None
    return result


def _in_one_walk(
    self: Any,  # noqa: ANN401 - a class of transformers
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    use_cache: bool = True,
    cache: Any = None,  # noqa: ANN401 - any cache
    **_ignored: Any,  # noqa: ANN401 - what the block takes
) -> tuple[torch.Tensor, None]:
    before, state = _states(self, cache, input_states)
    branch = self.linear_x(input_states).transpose(1, 2)
    cache.update_conv_state(branch, self.layer_idx, conv_kernel_size=self.conv1d_width - 1)
    inputs = torch.cat([before, branch], dim=-1)
    branch = F.conv1d(inputs, self.conv_1d.weight, self.conv_1d.bias, groups=self.lru_width)
    self.rg_lru.recurrent_states = state
    branch = self.rg_lru(branch.transpose(1, 2), position_ids)
    cache.update_recurrent_state(self.rg_lru.recurrent_states, self.layer_idx)
    self.rg_lru.recurrent_states = None
    return self.linear_out(branch * self.act_fn(self.linear_y(input_states))), None


def _walk(
    _unit: nn.Module,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_rnn_scan`: inputs and gates [B, S, W], the state [B, W]."""
    gates = (recurrent_gate * ~reset).to(acc_dtype).transpose(0, 1)
    states, last = linear_scan(gates, hidden_states.to(acc_dtype).transpose(0, 1), recurrent_states.to(acc_dtype))
    return states.transpose(0, 1).to(hidden_states.dtype), last
