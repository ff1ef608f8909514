"""Attention in windows of models that cut a sequence into blocks, in a form that can be captured at every length.

Longformer and LED pad a sequence to whole windows, and LongT5 to whole blocks, by numbers that depend on the length;
the first two also look up which tokens see all others. CANINE walks over its chunks in Python. While a model is
captured, its windows are attention with a mask: the same numbers, for the square of the length in time. BigBird, some
of whose blocks are at random, is refused.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.errors import CaptureError
from t2n_hf.trace.function_variants import in_scope, with_assignments
from t2n_hf.trace.swap import methods_replaced_by_class

__all__ = ["capturable_windows"]

_UNSEEN: Final = -1e10  # LongT5's own number: of a row that sees nothing, all others vanish beside it
# Whether tokens that see all others were asked for in the call that is running.
_GLOBAL: ContextVar[bool] = ContextVar("t2n_hf_windows_global", default=False)


def capturable_windows(model: nn.Module) -> AbstractContextManager[None]:
    """Let attention in windows run without cutting the sequence; all modules are as before after any exit."""
    return methods_replaced_by_class(model, _methods)


@cache
def _methods(kind: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
    """The methods that stand in for those of a class; the same ones for all its modules, so that layers are alike."""
    name = kind.__name__
    if name == "LongformerModel":
        return {"forward": _noting(kind.forward), "_pad_to_window_size": _not_padded}
    if name == "LongformerEncoder":
        forward = with_assignments(kind.forward, {"is_global_attn": "globals_asked()"})
        return {"forward": in_scope(forward, {"globals_asked": _GLOBAL.get})}
    if name == "LEDEncoder":
        asked = {"is_global_attn": "global_attention_mask is not None"}
        return {"forward": with_assignments(kind.forward, asked), "_pad_to_window_size": _not_padded}
    if name == "LongT5Stack":
        return {"forward": in_scope(kind.forward, {"_get_local_attention_mask": _mask_itself})}
    return _STAND_INS.get(name, {})


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that notes whether it was given a mask of tokens that see all others."""
    signature = inspect.signature(forward)

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        given = signature.bind(self, *args, **kwargs).arguments.get("global_attention_mask")
        token = _GLOBAL.set(given is not None)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _GLOBAL.reset(token)

    return noting


def _not_padded(_self: nn.Module, *, pad_token_id: int, **given: Any) -> tuple[Any, ...]:  # noqa: ANN401 - as it is called
    return (0, *given.values())


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, S, width] -> [B, heads, S, size]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _distances(length: int) -> torch.Tensor:
    """How far behind the token of its row that of its column is, [S, S] i64."""
    places = torch.arange(length)
    return places[None, :] - places[:, None]


def _near_or_global(  # noqa: PLR0917 - the signature that callers know
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    is_index_masked: torch.Tensor,
    is_index_global_attn: torch.Tensor,
    is_global_attn: bool,
    output_attentions: bool = False,
) -> Any:  # noqa: ANN401 - what the layer gives
    """States [B, S, width]; masks [B, S], that of attention 0 where a token is seen by those near it alone."""
    _refuse_weights(self, output_attentions)
    query, key, value = (_heads(part(hidden_states), self.num_heads) for part in (self.query, self.key, self.value))
    near = _distances(hidden_states.shape[1]).abs() <= self.one_sided_attn_window_size
    seen = near & (attention_mask == 0)[:, None, None, :]
    if is_global_attn:
        seen = seen | is_index_global_attn[:, None, None, :]
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    if is_global_attn:
        parts = (self.query_global, self.key_global, self.value_global)
        query, key, value = (_heads(part(hidden_states), self.num_heads) for part in parts)
        whole = F.scaled_dot_product_attention(query, key, value, attn_mask=~is_index_masked[:, None, None, :])
        result = torch.where(is_index_global_attn[:, None, :, None], whole, result)
    result = result.masked_fill(is_index_masked[:, None, :, None], 0.0)
    return (result.transpose(1, 2).flatten(2),)


def _refuse_weights(layer: nn.Module, asked: bool) -> None:
    if asked:
        raise CaptureError(
            f"the weights of {type(layer).__name__} are those of its windows, which are not cut while a model is "
            "captured; export it with output_attentions=False"
        )


def _refuse_other_attention(self: Any, _value: str) -> None:  # noqa: ANN401 - a class of transformers
    """Called for texts too short for blocks, after which the model has no blocks in any text: the next run knows none.

    A graph of it would be of full attention at every length.
    """
    raise CaptureError(
        f"{type(self).__name__} attends in blocks, some at random, to long texts, and to all of short ones, as the "
        "example is: load it with attention_type='original_full', or give an example of the one length that is wanted"
    )


def _mask_itself(attention_mask: torch.Tensor, _block: int, device: torch.device) -> torch.Tensor:
    return attention_mask.to(device)


def _in_blocks(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool = False,
) -> Any:  # noqa: ANN401 - what the layer gives
    """States [B, S, width], the mask of what is no padding [B, S], and the first layer's bias [B or 1, heads, S, S].

    A token sees those near it in its own block and the two beside it; one of padding sees all of these alike, and as
    many zeros as they lack to be whole.
    """
    _refuse_weights(self, output_attentions)
    length = hidden_states.shape[1]
    query, key, value = (_heads(part(hidden_states), self.n_heads) for part in (self.q, self.k, self.v))
    blocks = torch.arange(length) // self.block_len
    beside = (blocks[None, :] - blocks[:, None]).abs() <= 1
    if position_bias is None:
        position_bias = _bias_in_blocks(self, mask, length, beside)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=position_bias.to(query.dtype), scale=1.0)
    if mask is not None:
        share = beside.sum(-1).to(result.dtype) / (3 * self.block_len)
        result = torch.where((mask > 0)[:, None, :, None], result, result * share[:, None])
    return self.o(result.transpose(1, 2).flatten(2)), position_bias


def _bias_in_blocks(layer: Any, mask: torch.Tensor | None, length: int, beside: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a class of transformers
    distances = _distances(length)
    bias = torch.zeros(1, layer.n_heads, length, length)
    if layer.has_relative_attention_bias:
        buckets = layer._relative_position_bucket(
            distances,
            bidirectional=not layer.is_decoder,
            num_buckets=layer.relative_attention_num_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        bias = layer.relative_attention_bias(buckets).permute(2, 0, 1)[None]
    if mask is not None:
        seen = (mask > 0)[:, None, :, None] & (mask > 0)[:, None, None, :] & (distances.abs() < layer.block_len)
        bias = bias + torch.where(seen, 0.0, _UNSEEN)
    return torch.where(beside, bias, torch.finfo(bias.dtype).min)


def _in_blocks_and_sums(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool = False,
) -> Any:  # noqa: ANN401 - what the layer gives
    """As `_in_blocks`, with sums of the states of further blocks, G whole ones, among what is seen.

    The bias is [B or 1, heads, S, S + G + 2]: two sums that nothing sees let their number be any.
    """
    _refuse_weights(self, output_attentions)
    if self.global_block_size & (self.global_block_size - 1):
        raise CaptureError(
            f"blocks of {self.global_block_size} tokens (global_block_size), which transformers numbers in floats that "
            "are exact for powers of two alone; no other size is captured"
        )
    length, whole = hidden_states.shape[1], hidden_states.shape[1] // self.global_block_size
    real = torch.ones(hidden_states.shape[:2], dtype=torch.bool) if mask is None else mask > 0
    ids = _block_ids(real, self.global_block_size)
    numbers = torch.arange(whole + 2)
    chosen = (ids[..., None] == numbers).to(hidden_states.dtype)
    sums = self.global_input_layer_norm(chosen.transpose(1, 2) @ hidden_states)
    seen = torch.cat([hidden_states, sums], 1)
    query = _heads(self.q(hidden_states), self.n_heads)
    key, value = (_heads(part(seen), self.n_heads) for part in (self.k, self.v))
    blocks = torch.arange(length) // self.block_len
    beside = (blocks[None, :] - blocks[:, None]).abs() <= 1
    exists = numbers <= ids.amax(-1, keepdim=True)
    if position_bias is None:
        near = _bias_in_blocks(self, mask, length, beside)
        far = torch.where(numbers < whole, _bias_of_sums(self, real, ids, exists), torch.finfo(near.dtype).min)
        position_bias = torch.cat([near.expand(far.shape[0], -1, -1, -1), far], -1)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=position_bias.to(query.dtype), scale=1.0)
    if mask is not None:
        share = (beside.sum(-1).to(result.dtype) + whole) / (3 * self.block_len + whole)
        alone = ~real & (exists.sum(-1, keepdim=True) == whole)  # padding sees the sums that are of nothing, if any
        result = torch.where(alone[:, None, :, None], result * share[:, None], result)
    return self.o(result.transpose(1, 2).flatten(2)), position_bias


def _block_ids(real: torch.Tensor, size: int) -> torch.Tensor:
    """Which block each token is summed in, [B, S] i64; -1 for none. Those behind the last whole one are in that."""
    places = torch.arange(real.shape[1])
    ends = real & (places % size == size - 1)
    last = ends.sum(-1, keepdim=True) - 1
    return torch.minimum(torch.where(real, places // size, -1), last)


def _bias_of_sums(
    layer: Any,  # noqa: ANN401 - a class of transformers
    real: torch.Tensor,
    ids: torch.Tensor,
    exists: torch.Tensor,
) -> torch.Tensor:
    buckets = layer._relative_position_bucket(
        torch.arange(exists.shape[1]) - ids[..., None],
        bidirectional=not layer.is_decoder,
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
    )
    bias: torch.Tensor = layer.global_relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return bias + torch.where((real[..., None] == exists[:, None])[:, None], 0.0, _UNSEEN)


def _in_chunks(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    output_attentions: bool | None = False,
) -> Any:  # noqa: ANN401 - what the layer gives
    """States [B, S, width] and the mask of what may be seen [B, S, S], within chunks of one length."""
    width, stride = self.attend_from_chunk_width, self.attend_from_chunk_stride
    to_first = self.always_attend_to_first_position or self.first_position_attends_to_all
    alike = (width, stride) == (self.attend_to_chunk_width, self.attend_to_chunk_stride) and width == stride
    if not self.local or to_first or not alike or attention_mask is None:
        return type(self).forward(self, hidden_states, attention_mask, output_attentions)
    _refuse_weights(self, bool(output_attentions))
    layer = self.self
    parts = (layer.query, layer.key, layer.value)
    query, key, value = (_heads(part(hidden_states), layer.num_attention_heads) for part in parts)
    chunks = torch.arange(hidden_states.shape[1]) // width
    bias = (1.0 - attention_mask[:, None].float()) * torch.finfo(query.dtype).min
    # What is masked is seen when there is nothing else, but another chunk is not even then.
    bias = torch.where(chunks[:, None] == chunks[None, :], bias, -torch.inf)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
    return (self.output(result.transpose(1, 2).flatten(2), hidden_states),)


def _pooled_mask(_self: nn.Module, char_attention_mask: torch.Tensor, downsampling_rate: int) -> torch.Tensor:
    """Which molecules have a character that may be seen, [B, M] f32; max_pool1d would fix the length."""
    rows = char_attention_mask[:, None, None].float()
    return F.max_pool2d(rows, (1, downsampling_rate))[:, 0, 0]


def _spread(self: Any, molecules: torch.Tensor, char_seq_length: int) -> torch.Tensor:  # noqa: ANN401 - a class of transformers
    """To each character its molecule [B, M, width], counted after the first; the last one to all that is left."""
    places = torch.arange(char_seq_length, device=molecules.device) // self.config.downsampling_rate + 1
    return molecules[:, places.clamp(max=molecules.shape[1] - 1)]


_STAND_INS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "LongformerSelfAttention": {"forward": _near_or_global},
    "LEDEncoderSelfAttention": {"forward": _near_or_global},
    "BigBirdModel": {"set_attention_type": _refuse_other_attention},
    "BigBirdPegasusEncoder": {"set_attention_type": _refuse_other_attention},
    "CanineAttention": {"forward": _in_chunks},
    "CanineModel": {"_downsample_attention_mask": _pooled_mask, "_repeat_molecules": _spread},
    "LongT5LocalAttention": {"forward": _in_blocks},
    "LongT5TransientGlobalAttention": {"forward": _in_blocks_and_sums},
}
