"""Key/value caches as the exported graph sees them: whole, of known shape, and made of plain tensors.

transformers grows a cache by `update()`, cuts sliding-window layers to their window, and names the cache argument
differently from model to model. The archive wants one tensor in and one out per key and value, the whole past in
each. `WholeCache` is that: its tensors are set, not grown from nothing (growing would trace a concatenation with an
empty tensor), a sliding-window model keeps its sliding mask, and pytree functions see a flat list of tensors.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, get_layer_types_and_kwargs
from transformers.configuration_utils import get_head_shapes

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.trees import register_cache_trees
from t2n_hf.trace.layers import register_leaf_setter

__all__ = ["ATTENTION_KINDS", "CacheShape", "WholeCache", "WholeLayer", "cache_parameter", "cache_shapes"]

# transformers is renaming `past_key_values` to `cache`; the older names live on in models outside its tree.
_CACHE_NAMES: Final = ("cache", "past_key_values", "layer_past", "past_key_value")
ATTENTION_KINDS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True)
class CacheShape:
    """One layer's cache: keys are [1, key_heads, P, key_dim], values [1, value_heads, P, value_dim]."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def key(self, length: int) -> tuple[int, int, int, int]:
        """Shape of the keys of `length` tokens."""
        return (1, self.key_heads, length, self.key_dim)

    def value(self, length: int) -> tuple[int, int, int, int]:
        """Shape of the values of `length` tokens."""
        return (1, self.value_heads, length, self.value_dim)


@final
class WholeLayer(DynamicLayer):
    """A dynamic layer that is born with its tensors and never asks whether they are empty."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    # Asked when they are wanted: while a model is traced each layer of it makes such a cache, and to ask a tensor then
    # takes longer than all the rest.
    @property
    def dtype(self) -> torch.dtype:
        """Of the keys."""
        return self.keys.dtype  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the keys."""
        return self.keys.device  # type: ignore[union-attr]

    def get_seq_length(self) -> int:
        """Length of the past. The inherited test for an empty past would put a guard on a symbolic length."""
        return self.keys.shape[-2]  # type: ignore[union-attr]


@final
class WholeCache(DynamicCache):
    """A cache whose layers hold the whole past, whatever the model's windows are.

    Args:
        tensors: keys and values by turns, `[key_0, value_0, key_1, ...]`, each [1, H, P, D].
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        if len(tensors) % 2:
            raise ConfigError(f"a cache takes keys and values by turns, got {len(tensors)} tensors")
        self.layers = [WholeLayer(k, v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        """Keys and values by turns, as they are now."""
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]  # type: ignore[misc, union-attr]


def _flatten(cache: WholeCache) -> tuple[list[torch.Tensor], None]:
    return cache.tensors(), None


def _flatten_with_keys(cache: WholeCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(cache.tensors())], None


def _unflatten(tensors: Any, _context: Any) -> WholeCache:  # noqa: ANN401 - pytree passes any iterable
    return WholeCache(list(tensors))


def _put(cache: WholeCache, tensors: Mapping[int, torch.Tensor]) -> None:
    for number, tensor in tensors.items():
        setattr(cache.layers[number // 2], "values" if number % 2 else "keys", tensor)


register_leaf_setter(WholeCache, _put)
# The class is ours, so that this never clashes with a registration of DynamicCache by somebody else.
pytree.register_pytree_node(WholeCache, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
register_cache_trees()


def cache_parameter(forward: Callable[..., Any]) -> str | None:
    """Name of the parameter of `forward` that takes the cache, or None when it takes none."""
    parameters = inspect.signature(forward).parameters
    annotated = [name for name, p in parameters.items() if "Cache" in str(p.annotation)]
    return next((name for name in [*annotated, *_CACHE_NAMES] if name in parameters), None)


def cache_shapes(config: PreTrainedConfig) -> tuple[CacheShape, ...]:
    """Shape of the cache of each decoder layer, from the config alone.

    Raises ConfigError for a model whose layers keep another state than keys and values.
    """
    decoder = config.get_text_config(decoder=True)
    name = getattr(decoder, "model_type", type(decoder).__name__)
    if getattr(decoder, "num_attention_heads", None) is None:
        raise ConfigError(f"{name} has no attention heads: only models that cache keys and values are supported")
    kinds = get_layer_types_and_kwargs(decoder)[0]
    others = sorted(set(kinds) - ATTENTION_KINDS)
    if others:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(others)}; only layers that cache their own keys and values are "
            f"supported ({', '.join(sorted(ATTENTION_KINDS))})"
        )
    rank = getattr(decoder, "kv_lora_rank", None)
    if rank is not None:  # multi-head latent attention caches the latent and the rotated part, each as one head
        return (CacheShape(1, rank, 1, decoder.qk_rope_head_dim),) * len(kinds)
    heads, dims = (_per_layer(x, len(kinds)) for x in get_head_shapes(decoder))
    if getattr(decoder, "multi_query", False) and not getattr(decoder, "new_decoder_architecture", False):
        heads = [1] * len(kinds)
    return tuple(CacheShape(h, d, h, d) for h, d in zip(heads, dims, strict=True))


def _per_layer(value: int | list[int], layers: int) -> list[int]:
    return list(value) if isinstance(value, list) else [value] * layers
