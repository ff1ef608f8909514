"""A language model that also reads images or sounds, as three graphs.

"vision" (or "audio") makes features [F, width] of one image; "embedding" puts them among the embeddings of S tokens, at
the placeholders, in order; "decoder" continues after P past positions. The features of a conversation are given to
"embedding" together with the tokens that stand for them, and an empty [0, width] otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.grids import GridModel, reads_grids
from t2n_hf.hf.tasks.images import ImageModel, refuse_by_name, refused
from t2n_hf.hf.tasks.mixed import Mixing, decoder_interface, embedding_interface
from t2n_hf.hf.tasks.pipeline import Pipeline
from t2n_hf.hf.tasks.settings import capture_settings, outer_lists, takes
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface

__all__ = ["multimodal_pipeline", "reads_more_than_text"]


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
# Which tokens see those behind them (`Mixing.sees`), in models that take `token_type_ids`.
_SEEN_AHEAD: Final = {"gemma3": "image", "paligemma": "prefix"}


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

    Raises ConfigError for a model that gives tokens other positions, or other masks, where images are, in a way that
    is not known.
    """
    refuse_by_name(model)
    kind = _modality(model)
    if kind is None:
        raise refused(model, "has no method that makes features of images or sounds")
    token = _placeholder(model, kind)
    whole: GridModel | ImageModel = (
        GridModel(model) if reads_grids(model) else ImageModel(model, kind.input, kind.method)
    )
    width = whole.shape_of(whole.example)[-1]
    names = (kind.features, *(f"deep_{kind.features}_{number}" for number in range(whole.depth)))
    mixing = Mixing(
        token=token,
        width=width,
        features=names,
        sees=_seen_ahead(model),
        three_positions=_counts_in_three(model),
    )
    parts = {
        kind.part: _encoder_interface(whole, kind, names, task),
        "embedding": embedding_interface(model, mixing, dtype, task, max_context),
        "decoder": decoder_interface(model, mixing, dtype, task, all_logits=all_logits, max_context=max_context),
    }

    def answer(inputs: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        given = whole.prompt(inputs[kind.input], tokens)
        if mixing.sees != "none":
            # Of an image: which tokens those are. Of a prefix: what is not in it.
            is_image = (tokens == token).to(torch.int64)
            given["token_type_ids"] = is_image if mixing.sees == "image" else _behind(tokens, start(inputs))
        return model(input_ids=tokens, **given, use_cache=False, return_dict=True).logits[:, -1]

    def start(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # A prompt about one image: a few tokens around its placeholders.
        return torch.tensor([[1, *[token] * whole.shape_of(inputs[kind.input])[0], 2, 3]])

    return Pipeline(task=task.name, parts=parts, answer=answer, start=start, placeholder=token)


def _behind(tokens: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """1 for the tokens behind `prefix`, 0 for its own."""
    return (torch.arange(tokens.shape[1]) >= prefix.shape[1]).to(torch.int64).unsqueeze(0)


def _seen_ahead(model: PreTrainedModel) -> str:
    if not takes(model.forward, "token_type_ids"):
        return "none"
    kind = model.config.model_type
    if kind not in _SEEN_AHEAD:
        raise ConfigError(
            f"{type(model).__name__} lets tokens see those behind them, by token_type_ids, in a way that is known of "
            f"{', '.join(_SEEN_AHEAD)} only, not of {kind}; its text alone exports with task='text-generation'"
        )
    return _SEEN_AHEAD[kind]


def _counts_in_three(model: PreTrainedModel) -> bool:
    """Whether tokens have a position in time, height and width each. Raises ConfigError where it is not known how."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    three = "mrope_section" in rope
    if three and not takes(model.forward, "image_grid_thw"):
        raise ConfigError(
            f"{type(model).__name__} counts positions in three directions without image_grid_thw, which is not "
            "supported; its text alone exports with task='text-generation'"
        )
    return three


def _placeholder(model: PreTrainedModel, kind: _Modality) -> int:
    for name in kind.placeholders:
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            return token
    raise ConfigError(f"the configuration of {type(model).__name__} has none of {', '.join(kind.placeholders)}")


def _encoder_interface(whole: ImageModel | GridModel, kind: _Modality, names: tuple[str, ...], task: Task) -> Interface:
    encoder = whole.encoder
    model = encoder.model
    towers = [child for name, child in model.base_model.named_children() if name != "language_model"]
    return Interface(
        module=encoder,
        args=(whole.example,),
        dynamic_shapes=(dict(whole.dims),),
        input_names=(kind.input,),
        output_names=names,
        layers=tuple(name for tower in towers for name in outer_lists(encoder, tower)),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
    )
