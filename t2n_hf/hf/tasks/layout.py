"""What the layers of a decoder keep between calls, as tensors of an interface."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import KEY_VALUE_LENGTH, LayerStates, keeps_states, states_of
from t2n_hf.hf.caches.whole import cache_shapes
from t2n_hf.hf.tasks.settings import capture_settings

__all__ = ["cache_example", "cache_layout", "cache_names"]


def cache_layout(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each layer of `model` keeps in the cache that it takes. Raises ConfigError for something unknown."""
    if keeps_states(model):
        with capture_settings(model):
            return states_of(model)
    return tuple(LayerStates((shape.key(0), shape.value(0))) for shape in cache_shapes(model.config))


def cache_names(layout: Sequence[LayerStates]) -> list[str]:
    """Names of all tensors: "key_0", "value_0", "conv_1"."""
    return [f"{name}_{number}" for number, states in enumerate(layout) for name, _ in states.named()]


def cache_example(shape: tuple[int, ...], rows: int, past: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Zeros for `rows` sequences; `past` is the length of one that grows, None for one that does not."""
    rest = shape[1:] if past is None else (*shape[1:KEY_VALUE_LENGTH], past, *shape[KEY_VALUE_LENGTH + 1 :])
    return torch.zeros(rows, *rest, dtype=dtype)
