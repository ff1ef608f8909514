"""Caches of encoder-decoder models as exported graphs see them: their own keys and values, and those of the encoder.

The keys and values of cross-attention depend on the encoder's output alone. The graph of the encoder gives them, once;
the graph of the decoder takes them as plain inputs (`WholePairCache`) beside the cache that it grows.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.whole import WholeCache

__all__ = ["RecordedCaches", "WholePairCache"]


@final
class WholePairCache(EncoderDecoderCache):
    """What a decoder has seen, whole, and the keys and values of the encoder's output, computed already.

    Args:
        own: keys and values of the decoder's tokens by turns, each [B, H, P, D].
        cross: keys and values of the encoder's positions by turns, each [B, H, E, D]; as many.
    """

    def __init__(self, own: Sequence[torch.Tensor], cross: Sequence[torch.Tensor]) -> None:
        # The inherited constructor asks whether lengths are above 0: a guard, when they are symbols.
        if len(own) != len(cross):
            raise ConfigError(f"{len(own)} tensors of the decoder's cache for {len(cross)} of the encoder's output")
        self.self_attention_cache: WholeCache = WholeCache(own)
        self.cross_attention_cache: WholeCache = WholeCache(cross)
        self.is_updated = dict.fromkeys(range(len(self.cross_attention_cache.layers)), True)


def _leaves(cache: WholePairCache) -> list[torch.Tensor]:
    """Layer by layer: own key, own value, cross key, cross value; so each layer's part lies together."""
    own, cross = cache.self_attention_cache.tensors(), cache.cross_attention_cache.tensors()
    return [tensor for at in range(0, len(own), 2) for tensor in (*own[at : at + 2], *cross[at : at + 2])]


def _flatten(cache: WholePairCache) -> tuple[list[torch.Tensor], None]:
    return _leaves(cache), None


def _flatten_with_keys(cache: WholePairCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(_leaves(cache))], None


def _unflatten(tensors: Any, _context: Any) -> WholePairCache:  # noqa: ANN401 - pytree passes any iterable
    leaves = list(tensors)
    own = [tensor for at in range(0, len(leaves), 4) for tensor in leaves[at : at + 2]]
    cross = [tensor for at in range(2, len(leaves), 4) for tensor in leaves[at : at + 2]]
    return WholePairCache(own, cross)


# The class is ours, so that this never clashes with a registration of EncoderDecoderCache by somebody else.
pytree.register_pytree_node(WholePairCache, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


@final
class _RecordedLayer(DynamicLayer):
    """A layer without a past: it takes the states that it is given, where an empty one would be concatenated."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,  # noqa: ANN401
        **_kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the states; they are the whole sequence."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Nothing is past."""
        return 0


@final
class RecordedCaches(EncoderDecoderCache):
    """Caches for the first call of a decoder, to be read afterwards."""

    def __init__(self) -> None:
        super().__init__(DynamicCache(), DynamicCache())
        self.self_attention_cache.layer_class_to_replicate = _RecordedLayer
        self.cross_attention_cache.layer_class_to_replicate = _RecordedLayer

    def own(self) -> list[torch.Tensor]:
        """Keys and values of the decoder's own tokens, by turns."""
        return _tensors(self.self_attention_cache)

    def cross(self) -> list[torch.Tensor]:
        """Keys and values of the encoder's output, by turns."""
        return _tensors(self.cross_attention_cache)


def _tensors(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]  # type: ignore[misc, union-attr]
