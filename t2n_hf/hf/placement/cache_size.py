"""How many bytes the keys and values of a generation take, from the model's config alone."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.whole import cache_shapes

__all__ = ["cache_nbytes", "cache_nbytes_of"]


def cache_nbytes(
    config: PreTrainedConfig, max_length: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Give the bytes that each decoder layer's keys and values of `max_length` tokens take in `dtype`.

    A layer with a sliding window (or chunks) keeps no more tokens than that. An encoder-decoder model also keeps those
    of the encoder's tokens, of which as many are counted. Raises ConfigError for a model with another kind of state.
    """
    decoder = config.get_text_config(decoder=True)
    windows = get_layer_types_and_kwargs(decoder)[1]
    found = []
    for shape, options in zip(cache_shapes(config), windows, strict=True):
        length = min(max_length, options.get("sliding_window") or max_length)
        values = shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
        if getattr(config, "is_encoder_decoder", False):
            length += max_length
        found.append(batch_size * length * values * dtype.itemsize)
    return tuple(found)


def cache_nbytes_of(model: nn.Module, max_length: int | None, batch_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Give `cache_nbytes` of a model; nothing for one that does not generate, and without a length.

    Raises ConfigError for a model that keeps another kind of state.
    """
    config: Any = getattr(model, "config", None)
    if max_length is None or not isinstance(config, PreTrainedConfig):
        return ()
    can_generate: Any = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return ()
    try:
        return cache_nbytes(config, max_length, batch_size, dtype)
    except ConfigError as error:
        raise ConfigError(f"no room can be kept for max_length={max_length}: {error}; leave max_length out") from error
