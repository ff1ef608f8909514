"""A language model that also reads images or sounds, as three graphs.

"vision" (or "audio") makes features [F, width] of one image; "embedding" puts them among the embeddings of S tokens, at
the placeholders, in order; "decoder" continues after P past positions. The features of a conversation are given to
"embedding" together with the tokens that stand for them, and an empty [0, width] otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches import WholeCache, cache_parameter, cache_shapes
from t2n_hf.hf.tasks.inputs import main_input
from t2n_hf.hf.tasks.pipeline import Pipeline
from t2n_hf.hf.tasks.settings import capture_settings, last_position_only, layer_lists, outer_lists, takes
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.shapes import shapes_only

__all__ = ["multimodal_pipeline", "reads_more_than_text"]

_NEW: Final = 5
_PAST: Final = 6
_FEATURES: Final = 4


@dataclass(frozen=True)
class _Modality:
    """What a model reads beside text: the part, its input, the method that makes features, the placeholder's name."""

    part: str
    input: str
    method: str
    features: str
    placeholders: tuple[str, ...]


_MODALITIES: Final = (
    _Modality(
        "vision", "pixel_values", "get_image_features", "image_features", ("image_token_id", "image_token_index")
    ),
    _Modality(
        "audio", "input_features", "get_audio_features", "audio_features", ("audio_token_id", "audio_token_index")
    ),
)


def reads_more_than_text(model: PreTrainedModel) -> bool:
    """Whether `model` generates text and has a method that makes features of images or sounds."""
    return not model.config.is_encoder_decoder and model.can_generate() and _modality(model) is not None


def _modality(model: PreTrainedModel) -> _Modality | None:
    for kind in _MODALITIES:
        if takes(model.forward, kind.input) and hasattr(model.base_model, kind.method):
            return kind
    return None


def multimodal_pipeline(
    model: PreTrainedModel, task: Task, dtype: torch.dtype, *, all_logits: bool, max_context: int | None
) -> Pipeline:
    """Describe a model of images (or sounds) and text; `max_context` bounds S + P. No weight is read.

    Raises ConfigError for a model that gives tokens other positions, or other masks, where images are.
    """
    kind = _modality(model)
    if kind is None:
        raise ConfigError(f"{type(model).__name__} has no method that makes features of images or sounds")
    _refuse_special_attention(model, kind)
    token = _placeholder(model, kind)
    # One image: models go through several with a Python loop.
    given = main_input(model, kind.input, None).example[:1]
    encoder = _FeatureEncoder(model, kind)
    count, width = _features_of(encoder, given)
    parts = {
        kind.part: _encoder_interface(encoder, given, kind, task),
        "embedding": _embedding_interface(_Embedding(model, token), width, kind, dtype, task, max_context),
        "decoder": _decoder_interface(model, width, dtype, task, all_logits=all_logits, max_context=max_context),
    }

    def answer(inputs: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, **inputs, use_cache=False, return_dict=True).logits[:, -1]

    # A prompt about one image: a few tokens around its placeholders.
    start = torch.tensor([[1, *[token] * count, 2, 3]])
    return Pipeline(task=task.name, parts=parts, answer=answer, start=start, placeholder=token)


def _refuse_special_attention(model: PreTrainedModel, kind: _Modality) -> None:
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope or takes(model.forward, "image_grid_thw"):
        raise ConfigError(
            f"{type(model).__name__} counts the positions of {kind.part} in three directions, which is not supported; "
            "its text alone exports with task='text-generation'"
        )
    if takes(model.forward, "token_type_ids"):
        raise ConfigError(
            f"{type(model).__name__} lets the tokens of an image see each other, which is not supported; its text "
            "alone exports with task='text-generation'"
        )


def _placeholder(model: PreTrainedModel, kind: _Modality) -> int:
    for name in kind.placeholders:
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            return token
    raise ConfigError(f"the configuration of {type(model).__name__} has none of {', '.join(kind.placeholders)}")


def _features_of(encoder: "_FeatureEncoder", given: torch.Tensor) -> tuple[int, int]:
    model = encoder.model
    with capture_settings(model), shapes_only(model):
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        count, width = encoder(torch.empty(tuple(given.shape), dtype=kind))[0].shape
        return int(count), int(width)


@final
class _FeatureEncoder(nn.Module):
    """An image or a sound to the features that take the places of placeholders."""

    def __init__(self, model: PreTrainedModel, kind: _Modality) -> None:
        super().__init__()
        self.model = model
        self._method = kind.method

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        """Give features [F, width] of an image or a sound [1, ...]."""
        features = getattr(self.model.base_model, self._method)(values, return_dict=True).pooler_output
        joined = torch.cat(list(features), dim=0) if isinstance(features, (list, tuple)) else features
        return (joined.reshape(-1, joined.shape[-1]),)


@final
class _Embedding(nn.Module):
    """Tokens to embeddings, features in the places of placeholders."""

    def __init__(self, model: PreTrainedModel, token: int) -> None:
        super().__init__()
        self.model = model
        self._token = token

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor]:
        """Give embeddings [1, S, width] of `input_ids` [1, S] i64, with `features` [F, width] at its placeholders."""
        length = input_ids.shape[1]
        stands = input_ids == self._token
        # The placeholder may be a token that the table lacks.
        words = self.model.get_input_embeddings()(torch.where(stands, 0, input_ids))
        joined = torch.cat([words[0], features.to(words.dtype)], dim=0)
        rank = torch.cumsum(stands.to(torch.int64), dim=1) - 1
        place = torch.where(stands, rank + length, torch.arange(length).unsqueeze(0))
        return (joined[place[0]].unsqueeze(0),)


@final
class _Decoder(nn.Module):
    """The language model over embeddings."""

    def __init__(self, model: PreTrainedModel, cache_name: str, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_name
        self._all_logits = all_logits
        self._keeps = takes(model.forward, "logits_to_keep")

    def forward(self, inputs_embeds: torch.Tensor, caches: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run S new positions [1, S, width] after P past ones; returns logits and the grown caches."""
        cache = WholeCache(caches)
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        if self._keeps:
            arguments["logits_to_keep"] = 0 if self._all_logits else 1
        with last_position_only(None if self._keeps or self._all_logits else self.model.get_output_embeddings()):
            logits = self.model(inputs_embeds=inputs_embeds, **arguments).logits
        return (logits, *cache.tensors())


def _encoder_interface(encoder: _FeatureEncoder, given: torch.Tensor, kind: _Modality, task: Task) -> Interface:
    model = encoder.model
    towers = [child for name, child in model.base_model.named_children() if name != "language_model"]
    return Interface(
        module=encoder,
        args=(given,),
        dynamic_shapes=({},),
        input_names=(kind.input,),
        output_names=(kind.features,),
        layers=tuple(name for tower in towers for name in outer_lists(encoder, tower)),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
    )


def _embedding_interface(
    embedding: _Embedding, width: int, kind: _Modality, dtype: torch.dtype, task: Task, longest: int | None
) -> Interface:
    model = embedding.model
    limit = {} if longest is None else {"max": longest}
    return Interface(
        module=embedding,
        args=(torch.zeros(1, _NEW, dtype=torch.int64), torch.zeros(_FEATURES, width, dtype=dtype)),
        dynamic_shapes=({1: torch.export.Dim("S", min=1, **limit)}, {0: torch.export.Dim("F", min=0)}),
        input_names=("input_ids", kind.features),
        output_names=("inputs_embeds",),
        asserts=("S >= 1", "F >= 0"),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
    )


def _decoder_interface(
    model: PreTrainedModel, width: int, dtype: torch.dtype, task: Task, *, all_logits: bool, max_context: int | None
) -> Interface:
    cache_name = cache_parameter(model.forward)
    if cache_name is None:
        raise ConfigError(f"{type(model).__name__} takes no key/value cache, which {task.name} needs")
    shapes = cache_shapes(model.config)
    caches = [torch.zeros(side(_PAST), dtype=dtype) for shape in shapes for side in (shape.key, shape.value)]
    limit = {} if max_context is None else {"max": max(_NEW + _PAST, max_context - 2)}
    new, past = torch.export.Dim("S", min=1, **limit), torch.export.Dim("P", min=0, **limit)
    sides = [f"{side}_{i}" for i in range(len(shapes)) for side in ("key", "value")]
    bound = () if max_context is None else (f"S+P < {max_context + 1}",)
    return Interface(
        module=_Decoder(model, cache_name, all_logits=all_logits),
        args=(torch.zeros(1, _NEW, width, dtype=dtype), caches),
        dynamic_shapes=({1: new}, [{2: past}] * len(caches)),
        input_names=("inputs_embeds", *(f"in_cache_{side}" for side in sides)),
        output_names=("outputs", *(f"out_cache_{side}" for side in sides)),
        asserts=("P >= 0", "S >= 1", *bound, "tg: S==1", "pp: P==0"),
        layers=layer_lists(model),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context, "all_logits": all_logits},
    )
