"""What the layers of a decoder keep between calls, as tensors of an interface."""

from collections.abc import Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import KEY_VALUE_LENGTH, LayerStates, keeps_states, states_of
from t2n_hf.hf.caches.whole import CacheShape, cache_shapes
from t2n_hf.hf.tasks.settings import capture_settings
from t2n_hf.trace.walk import attribute_of, modules_of

__all__ = ["cache_example", "cache_layout", "cache_names"]

# How configurations call the number of times (Dory, Inkling 2).
_ROUNDS: Final = ("n_recurrent_loops", "loop_num_passes")


def cache_layout(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each layer of `model` keeps in the cache that it takes. Raises ConfigError for something unknown."""
    if not keeps_states(model) and not _goes_round(model):
        shapes = _of_decoder(model, cache_shapes(model.config))
        if _are_those_of(model, shapes):
            return tuple(LayerStates((shape.key(0), shape.value(0))) for shape in shapes)
    with capture_settings(model):
        return states_of(model)


def _of_decoder(model: PreTrainedModel, shapes: Sequence[CacheShape]) -> Sequence[CacheShape]:
    """As many as the decoder has layers; for BART and its like transformers counts those of the encoder."""
    depth = getattr(model.config, "decoder_layers", None)
    return shapes if not isinstance(depth, int) or len(set(shapes)) != 1 else [shapes[0]] * depth


def _goes_round(model: PreTrainedModel) -> bool:
    """Whether `model` goes through some of its layers several times, and may have a cache for each time."""
    config = model.config.get_text_config(decoder=True)
    return any(getattr(config, name, 1) > 1 for name in _ROUNDS)


def _are_those_of(model: PreTrainedModel, shapes: Sequence[CacheShape]) -> bool:
    """Whether what the config says of keys and values is what comes out of the projections of `model`.

    Layers of two kinds may have other numbers of heads, or values another size than keys, under names of their own.
    """
    for module in modules_of(model):
        layer = attribute_of(module, "layer_idx")
        if not isinstance(layer, int) or layer >= len(shapes):
            continue
        widths = [getattr(attribute_of(module, name), "out_features", None) for name in ("k_proj", "v_proj")]
        if None not in widths:
            shape = shapes[layer]
            if widths != [shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim]:
                return False
    return True


def cache_names(layout: Sequence[LayerStates]) -> list[str]:
    """Names of all tensors: "key_0", "value_0", "conv_1"."""
    return [f"{name}_{number}" for number, states in enumerate(layout) for name, _ in states.named()]


def cache_example(shape: tuple[int, ...], rows: int, past: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Zeros for `rows` sequences; `past` is the length of one that grows, None for one that does not."""
    rest = shape[1:] if past is None else (*shape[1:KEY_VALUE_LENGTH], past, *shape[KEY_VALUE_LENGTH + 1 :])
    return torch.zeros(rows, *rest, dtype=dtype)
