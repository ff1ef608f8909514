"""Caches of layers that keep a state of fixed size: state-space models, linear attention, and hybrids with attention.

As in `caches.whole`, a cache is made of plain tensors that are set, not grown from nothing. A state of zeros is that of
a model that has seen nothing, so the first call needs no other graph than the later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.whole import ATTENTION_KINDS, WholeLayer, cache_parameter
from t2n_hf.trace.shapes import shapes_only

__all__ = [
    "KEY_VALUE_LENGTH",
    "LayerStates",
    "StateCache",
    "growing",
    "keeps_states",
    "past_length",
    "states_of",
]

KEY_VALUE_LENGTH: Final = 2  # axis of keys and values that grows
_KEEPS_NOTHING: Final = "dummy"  # transformers' word for layers without a cache
_PROBED: Final = 3  # tokens of the run that shows the shapes
_SIDES: Final = ("key", "value")
# A layer of any other class, of these too, may keep more than is known here.
_OF_ATTENTION: Final = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


@dataclass(frozen=True)
class LayerStates:
    """What one layer keeps: shapes for a batch of one, without the growing axis filled in (it is 0).

    Attributes:
        attention: shapes of its keys and values, and of the keys of its index [1, 1, 0, D] if it has one; or empty.
        convolutions: number of a state -> shape of the last inputs of its convolution, [1, channels, width].
        recurrent: number of a state -> shape of what it has accumulated.
    """

    attention: tuple[tuple[int, ...], ...] = ()
    convolutions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    recurrent: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def named(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of its tensors, in order: "key", "value", "index", "conv", "state", "conv_1" if second."""
        yield from zip(("key", "value", "index"), self.attention, strict=False)
        for stem, numbered in (("conv", self.convolutions), ("state", self.recurrent)):
            for number, shape in numbered:
                yield (stem if number == 0 else f"{stem}_{number}"), shape

    def grows(self) -> Iterator[bool]:
        """For each tensor, whether it grows with the tokens."""
        yield from (True for _ in self.attention)
        yield from (False for _ in range(self.fixed))

    @property
    def fixed(self) -> int:
        """Number of its tensors of fixed size."""
        return len(self.convolutions) + len(self.recurrent)

    @property
    def count(self) -> int:
        """Number of its tensors."""
        return len(self.attention) + self.fixed

    @property
    def plain(self) -> bool:
        """Whether it keeps keys and values, and nothing else."""
        return self.count == len(_SIDES) == len(self.attention)


def growing(layout: Sequence[LayerStates]) -> list[bool]:
    """For each tensor of `layout`, layer by layer, whether it grows with the tokens."""
    return [grown for states in layout for grown in states.grows()]


def past_length(tensors: Sequence[torch.Tensor], layout: Sequence[LayerStates]) -> int:
    """Number of past tokens in the tensors of `layout`, as a symbol where it is one; 0 when none of them grows."""
    grown = (tensor for tensor, grows in zip(tensors, growing(layout), strict=True) if grows)
    return next((tensor.shape[KEY_VALUE_LENGTH] for tensor in grown), 0)


class _Kept(LinearAttentionLayer):
    """States that are born with their tensors, and replaced instead of written to."""

    def keep(self, states: LayerStates, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors of `states`, without its keys and values."""
        rest = iter(tensors)
        for number, _ in states.convolutions:
            self.conv_states[number] = convolution = next(rest)
            self.conv_kernel_size[number] = convolution.shape[-1]
            self.is_conv_states_initialized[number] = True
        for number, _ in states.recurrent:
            self.recurrent_states[number] = next(rest)
            self.is_recurrent_states_initialized[number] = True
        self.has_previous_state = dict.fromkeys(self.has_previous_state, True)
        self.dtype, self.device = tensors[0].dtype, tensors[0].device  # type: ignore[assignment]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_ignored: Any,  # noqa: ANN401 - whatever models pass to every cache
    ) -> torch.Tensor:
        """Put the new inputs [B, channels, S] behind the last ones, keep the last, and give all of them."""
        before: torch.Tensor = self.conv_states[state_idx]  # type: ignore[assignment]
        inputs = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = inputs[..., -before.shape[-1] :].to(before.dtype, copy=True)
        return inputs

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,
        state_idx: int = 0,
        **_ignored: Any,  # noqa: ANN401 - whatever models pass to every cache
    ) -> torch.Tensor:
        """Replace the state."""
        before: torch.Tensor = self.recurrent_states[state_idx]  # type: ignore[assignment]
        self.recurrent_states[state_idx] = recurrent_states.to(before.dtype)
        return recurrent_states


@final
class _StateLayer(_Kept):
    """A layer without attention."""


@final
class _HybridLayer(_Kept, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A layer with states and attention."""

    def __init__(self, number_of_states: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states)
        self.keys, self.values, self.is_initialized = keys, values, True

    def get_seq_length(self) -> int:
        """Length of the past, as a symbol where it is one."""
        return self.keys.shape[KEY_VALUE_LENGTH]  # type: ignore[union-attr]


@final
class _IndexedLayer(DynamicIndexedLayer):
    """A layer of attention whose index says which tokens are seen: it keeps keys of its own, [B, P, D].

    Outside they are [B, 1, P, D], so that whatever grows does so along one axis.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.indexer_keys = keys, values, index.squeeze(1)
        self.is_initialized = self.is_indexer_initialized = True

    def get_seq_length(self) -> int:
        """Length of the past, as a symbol where it is one."""
        return self.keys.shape[KEY_VALUE_LENGTH]  # type: ignore[union-attr]


@final
class StateCache(DynamicCache):
    """A cache of layers of any kind.

    Args:
        tensors: those of `layout`, layer by layer, in the order of `LayerStates.named`.
        layout: what each layer keeps.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: Sequence[LayerStates]) -> None:
        super().__init__()
        if len(tensors) != sum(states.count for states in layout):
            raise ConfigError(
                f"got {len(tensors)} tensors for a cache of {sum(states.count for states in layout)} in "
                f"{len(layout)} layers"
            )
        self.layout = tuple(layout)
        rest = iter(tensors)
        self.layers = [_layer(states, [next(rest) for _ in range(states.count)]) for states in layout]

    def get_linear_cache(self, layer: int) -> torch.Tensor:
        """MiniMax's name for the state of a layer."""
        return self.layers[layer].recurrent_states[0]  # type: ignore[union-attr, return-value]

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        """MiniMax's name for replacing it."""
        self.layers[layer].recurrent_states[0] = state  # type: ignore[union-attr]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors as they are now."""
        return [tensor for part in self.parts() for tensor in part]

    def parts(self) -> list[list[torch.Tensor]]:
        """The tensors of each layer as they are now."""
        return [_tensors_of(layer, states) for layer, states in zip(self.layers, self.layout, strict=True)]


def _layer(states: LayerStates, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401 - layers have no common type
    attention, rest = tensors[: len(states.attention)], tensors[len(states.attention) :]
    numbers = [number for number, _ in (*states.convolutions, *states.recurrent)]
    if not tensors:
        return DummyLayer()
    if not rest:
        return WholeLayer(*attention) if states.plain else _IndexedLayer(*attention)
    count = 1 + max(numbers)
    layer = _HybridLayer(count, *attention) if attention else _StateLayer(count)
    layer.keep(states, rest)
    return layer


def _tensors_of(layer: Any, states: LayerStates) -> list[torch.Tensor]:  # noqa: ANN401 - as above
    return [
        *([layer.keys, layer.values] if states.attention else []),
        *([layer.indexer_keys.unsqueeze(1)] if len(states.attention) > len(_SIDES) else []),
        *(layer.conv_states[number] for number, _ in states.convolutions),
        *(layer.recurrent_states[number] for number, _ in states.recurrent),
    ]


_Layout: TypeAlias = tuple[tuple[Any, ...], ...]


def _plain(cache: StateCache) -> _Layout:
    """The layout in tuples and numbers, which structures can be written as text with."""
    return tuple((states.attention, states.convolutions, states.recurrent) for states in cache.layout)


def _flatten(cache: StateCache) -> tuple[list[list[torch.Tensor]], _Layout]:
    """One list for each layer: layers keep different numbers of tensors."""
    return cache.parts(), _plain(cache)


def _flatten_with_keys(cache: StateCache) -> tuple[list[tuple[Any, Any]], _Layout]:
    return [(pytree.SequenceKey(number), part) for number, part in enumerate(cache.parts())], _plain(cache)


def _unflatten(parts: Any, layout: _Layout) -> StateCache:  # noqa: ANN401 - pytree passes any iterable
    return StateCache([tensor for part in parts for tensor in part], [LayerStates(*states) for states in layout])


pytree.register_pytree_node(StateCache, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether a layer of `model` keeps something else than keys and values, or nothing at all."""
    config = model.config.get_text_config(decoder=True)
    return not set(get_layer_types_and_kwargs(config)[0]) <= ATTENTION_KINDS


def states_of(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    """What each layer of `model` keeps, found by running it on shapes alone; no weight is read.

    Raises ConfigError for a model whose layers keep something else.
    """
    cache = DynamicCache(config=model.config)
    name = cache_parameter(model.forward)
    if name is None:
        raise ConfigError(f"{type(model).__name__} takes no cache, which text-generation needs")
    with shapes_only(model):
        try:
            model(input_ids=torch.zeros(1, _PROBED, dtype=torch.int64), use_cache=True, **{name: cache})
        except ValueError as error:
            raise ConfigError(
                f"{type(model).__name__} does not run with a DynamicCache of transformers, so what its layers keep is "
                f"not known: {error} Export it with example_args of its own"
            ) from error
    layout = [_read(layer, f"layer {number} of {type(model).__name__}") for number, layer in enumerate(cache.layers)]
    kinds = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0]
    # A model that goes through its layers several times may have a cache for each time, behind those of the first.
    for number, (states, kind) in enumerate(zip(layout, kinds, strict=False)):
        if kind != _KEEPS_NOTHING and not states.count:
            raise ConfigError(
                f"layer {number} of {type(model).__name__} ({kind}) keeps its state outside of its cache, which is not "
                "supported; export the model with example_args of its own"
            )
    return tuple(layout)


def _read(layer: Any, where: str) -> LayerStates:  # noqa: ANN401 - layers have no common type
    attention: tuple[tuple[int, ...], ...] = ()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        sides = [tuple(side.shape) for side in (layer.keys, layer.values)]  # type: ignore[union-attr]
        if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
            rows, length, size = layer.indexer_keys.shape  # type: ignore[union-attr]
            sides.append((rows, 1, length, size))
        attention = tuple((*shape[:KEY_VALUE_LENGTH], 0, *shape[KEY_VALUE_LENGTH + 1 :]) for shape in sides)
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        if isinstance(layer, DummyLayer) or type(layer) in _OF_ATTENTION:
            return LayerStates(attention)
        raise ConfigError(
            f"{where} keeps a {type(layer).__name__}, which is not supported: it may hold more than keys and values. "
            "Export the model with example_args of its own"
        )
    return LayerStates(attention, _shapes(layer.conv_states), _shapes(layer.recurrent_states))


def _shapes(states: Mapping[int, torch.Tensor | None]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((number, tuple(state.shape)) for number, state in states.items() if state is not None)
