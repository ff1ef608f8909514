"""The graphs behind an encoder of images or sounds: "embedding" puts features among tokens, "decoder" goes on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.states import KEY_VALUE_LENGTH, LayerStates, StateCache, growing, past_length
from t2n_hf.hf.caches.whole import WholeCache, cache_parameter
from t2n_hf.hf.capturable.recurrence import begins_anew
from t2n_hf.hf.tasks.layout import cache_example, cache_layout, cache_names
from t2n_hf.hf.tasks.rows import AllRows
from t2n_hf.hf.tasks.seen_ahead import image_masks, prefix_masks
from t2n_hf.hf.tasks.settings import capture_settings, last_position_only, layer_lists, takes
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface

__all__ = ["MARKS", "Mixing", "decoder_interface", "embedding_interface"]

_NEW: Final = 5
_PAST: Final = 6
_FEATURES: Final = 4
# Which of the new tokens stand for an image.
MARKS: Final = "token_type_ids"
_POSITIONS: Final = "position_ids"


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How features and tokens meet in a model.

    Attributes:
        token: the placeholder.
        width: numbers per feature.
        features: names of the encoder's outputs; those after the first are added inside the decoder.
        sees: which tokens see those behind them: "none", those of one "image", or all of a "prefix", the tokens of a
            call that has no past.
        three_positions: whether each token has three positions, which somebody has to compute.
    """

    token: int
    width: int
    features: tuple[str, ...]
    sees: str = "none"
    three_positions: bool = False

    @property
    def deep(self) -> tuple[str, ...]:
        """Names of what is added inside the decoder, as [1, S, width]."""
        return tuple(f"placed_{name}" for name in self.features[1:])


@final
class _Embedding(nn.Module):
    """Tokens to embeddings, features in the places of placeholders."""

    def __init__(self, model: PreTrainedModel, mixing: Mixing) -> None:
        super().__init__()
        self.model = model
        self._mixing = mixing

    def forward(self, input_ids: torch.Tensor, features: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Give embeddings [1, S, width] of `input_ids` [1, S] i64, with `features` [F, width] at its placeholders.

        Further features are put among zeros in the same way. Where tokens of an image see each other, the last output
        says which tokens those are, [1, S] i64.
        """
        length = input_ids.shape[1]
        stands = input_ids == self._mixing.token
        # The placeholder may be a token that the table lacks.
        words = self.model.get_input_embeddings()(torch.where(stands, 0, input_ids))
        rank = torch.cumsum(stands.to(torch.int64), dim=1) - 1
        place = torch.where(stands, rank + length, torch.arange(length).unsqueeze(0))
        grounds = [words[0], *(torch.zeros_like(words[0]) for _ in features[1:])]
        joined = [
            torch.cat([ground, given.to(words.dtype)], dim=0) for ground, given in zip(grounds, features, strict=True)
        ]
        placed = tuple(both[place[0]].unsqueeze(0) for both in joined)
        return (*placed, stands.to(torch.int64)) if self._mixing.sees == "image" else placed


@final
class _Decoder(nn.Module):
    """The language model over embeddings."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache_name: str,
        mixing: Mixing,
        layout: Sequence[LayerStates],
        *,
        all_logits: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_name
        self._mixing = mixing
        self._layout = tuple(layout)
        self._all_logits = all_logits
        self._keeps = takes(model.forward, "logits_to_keep")

    def forward(
        self, inputs_embeds: torch.Tensor, caches: list[torch.Tensor], more: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run S new positions [1, S, width] after P past ones; returns logits and the grown caches.

        `more` are features [1, S, width] for the first layers, three positions [3, 1, S] i64 of each token, and which
        tokens stand for an image, [1, S] i64: those that the model takes.
        """
        mixing, cache, left = self._mixing, self._cache(caches), list(more)
        past = past_length(caches, self._layout)
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        told: dict[str, Any] = {}
        if mixing.deep:
            told["visual_pos_masks"] = AllRows()
            told["deepstack_visual_embeds"] = [left.pop(0) for _ in mixing.deep]
        if mixing.three_positions:
            arguments[_POSITIONS] = left.pop(0)
        if mixing.sees != "none":
            window = getattr(self.model.config.get_text_config(), "sliding_window", None)
            told["attention_mask"] = (
                image_masks(left.pop(0), past, window, inputs_embeds)
                if mixing.sees == "image"
                else prefix_masks(inputs_embeds.shape[1], past, window, inputs_embeds)
            )
            if window is None:
                told["attention_mask"] = told["attention_mask"]["full_attention"]
        if self._keeps:
            arguments["logits_to_keep"] = 0 if self._all_logits else 1
        head = None if self._keeps or self._all_logits else self.model.get_output_embeddings()
        with ExitStack() as stack:
            stack.enter_context(last_position_only(head))
            if told:
                stack.enter_context(_told(self.model.base_model.language_model, told))  # type: ignore[arg-type]
            logits = self.model(inputs_embeds=inputs_embeds, **arguments).logits
        return (logits, *cache.tensors())

    def _cache(self, caches: list[torch.Tensor]) -> WholeCache | StateCache:
        if all(states.plain for states in self._layout):
            return WholeCache(caches)
        return StateCache([tensor.clone() for tensor in caches], self._layout)  # states are written to in place


@contextmanager
def _told(module: nn.Module, options: Mapping[str, Any]) -> Iterator[None]:
    """Let `module` be called with these keyword arguments in place of those that it is given, until the block ends."""

    def replaced(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        return args, {**kwargs, **options}

    handle = module.register_forward_pre_hook(replaced, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def embedding_interface(
    model: PreTrainedModel, mixing: Mixing, dtype: torch.dtype, task: Task, longest: int | None
) -> Interface:
    """Describe the graph that embeds S tokens and F features; `longest` bounds S."""
    limit = {} if longest is None else {"max": longest}
    features = [torch.zeros(_FEATURES, mixing.width, dtype=dtype) for _ in mixing.features]
    count = torch.export.Dim("F", min=0)
    return Interface(
        module=_Embedding(model, mixing),
        args=(torch.zeros(1, _NEW, dtype=torch.int64), features),
        dynamic_shapes=({1: torch.export.Dim("S", min=1, **limit)}, [{0: count} for _ in features]),
        input_names=("input_ids", *mixing.features),
        output_names=("inputs_embeds", *mixing.deep, *((MARKS,) if mixing.sees == "image" else ())),
        asserts=("S >= 1", "F >= 0"),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=_captured(model),
    )


def decoder_interface(
    model: PreTrainedModel,
    mixing: Mixing,
    dtype: torch.dtype,
    task: Task,
    *,
    all_logits: bool,
    max_context: int | None,
) -> Interface:
    """Describe the language model over embeddings, with its cache as inputs and outputs; `max_context` bounds S + P.

    Raises ConfigError for a model without a cache.
    """
    cache_name = cache_parameter(model.forward)
    if cache_name is None:
        raise ConfigError(f"{type(model).__name__} takes no key/value cache, which {task.name} needs")
    layout = cache_layout(model)
    if begins_anew(model) or not any(states.attention for states in layout):
        raise ConfigError(
            f"the decoder of {type(model).__name__} forgets its state at every call of several tokens, or attends to "
            "nothing at all, which is supported in models of text only"
        )
    kept = [shape for states in layout for _, shape in states.named()]
    grows = growing(layout)
    caches = [
        cache_example(shape, 1, _PAST if grown else None, dtype) for shape, grown in zip(kept, grows, strict=True)
    ]
    limit = {} if max_context is None else {"max": max(_NEW + _PAST, max_context - 2)}
    new, past = torch.export.Dim("S", min=1, **limit), torch.export.Dim("P", min=0, **limit)
    names = cache_names(layout)
    bound = () if max_context is None else (f"S+P < {max_context + 1}",)
    more = {name: (torch.zeros(1, _NEW, mixing.width, dtype=dtype), {1: new}) for name in mixing.deep}
    if mixing.three_positions:
        more[_POSITIONS] = (_example_positions(), {2: new})
    if mixing.sees == "image":
        more[MARKS] = (torch.tensor([[0, 1, 1, 0, 1]]), {1: new})
    return Interface(
        module=_Decoder(model, cache_name, mixing, layout, all_logits=all_logits),
        args=(torch.zeros(1, _NEW, mixing.width, dtype=dtype), caches, [example for example, _ in more.values()]),
        dynamic_shapes=(
            {1: new},
            [{KEY_VALUE_LENGTH: past} if grown else None for grown in grows],
            [dims for _, dims in more.values()],
        ),
        input_names=("inputs_embeds", *(f"in_cache_{name}" for name in names), *more),
        output_names=("outputs", *(f"out_cache_{name}" for name in names)),
        asserts=("P >= 0", "S >= 1", *bound, "tg: S==1", "pp: P==0"),
        layers=layer_lists(model),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=_captured(model),
        precise=frozenset(f"in_cache_{name}" for name in names if name.startswith("state")),
        extra={"max_context": max_context, "all_logits": all_logits},
    )


def _example_positions() -> torch.Tensor:
    """A word, a picture of two rows and columns without its last place: the three counts differ."""
    return torch.tensor([[0, 1, 1, 1, 3], [0, 1, 1, 2, 3], [0, 1, 2, 1, 3]]).unsqueeze(1)


def _captured(model: PreTrainedModel) -> Callable[[], Any]:
    return lambda: capture_settings(model)
