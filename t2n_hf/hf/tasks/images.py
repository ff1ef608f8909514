"""Images and sounds that reach a model as they are, one after the other, to features."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.inputs import main_input
from t2n_hf.hf.tasks.settings import capture_settings, takes
from t2n_hf.trace.shapes import shapes_only

__all__ = ["FeatureEncoder", "ImageModel", "refuse_by_name", "refused"]

# What models do with features, or beside them, that three graphs of the common kind would leave out.
_REFUSED: Final = {
    "blip-2": "hides its language model, and that one's cache, behind a forward without a cache",
    "chameleon": "makes tokens of its vocabulary from pictures, by tables that its code builds when it runs",
    "emu3": "makes tokens of its vocabulary from pictures, by tables that its code builds when it runs",
    "gemma3n": "gives each layer embeddings of its own of the tokens",
    "gemma4": "gives each layer embeddings of its own of the tokens",
    "granite_speech": "attends to sounds in blocks, and masks the last one by what is left of the length",
    "granite_speech_plus": "attends to sounds in blocks, and masks the last one by what is left of the length",
    "instructblip": "reads the instruction while it makes features of the image",
    "kosmos-2": "says by image_embeds_position_mask, not by a token, where features go",
    "llama4": "reads, in its forward, an output that its language model lacks (transformers 5.24)",
    "llava_next": "cuts a picture into a number of tiles that depends on its size",
    "llava_next_video": "cuts a picture into a number of tiles that depends on its size",
    "llava_onevision": "cuts a picture into a number of tiles that depends on its size",
    "mllama": "attends to images through layers of its own, instead of putting their features among tokens",
    "ovis2": "puts embeddings of its own in the places of indicator tokens around each image",
    "video_llava": "takes pictures as pixel_values_images, beside videos",
}


def refuse_by_name(model: PreTrainedModel) -> None:
    """Raise ConfigError for a family that does more with images than the three graphs say."""
    why = _REFUSED.get(model.config.model_type)
    if why is not None:
        raise refused(model, why)


def refused(model: PreTrainedModel, why: str) -> ConfigError:
    """The error that says why `model` is not exported."""
    return ConfigError(
        f"{type(model).__name__} {why}, which is not supported; its text alone exports with task='text-generation' "
        "where transformers has a causal class for it"
    )


@final
class ImageModel:
    """A model that takes images (or sounds) as they are: its encoder, an example, the inputs of the whole.

    Raises ConfigError for one whose features need more than the image, or go other ways than in the places of tokens.
    """

    depth: Final = 0

    def __init__(self, model: PreTrainedModel, name: str, method: str) -> None:
        make = _MAKERS.get(model.config.model_type) or _by_method(model, method)
        self._model, self._name = model, name
        self.encoder = FeatureEncoder(model, make)
        # One image: models go through several with a Python loop.
        given = main_input(model, name, None)
        self.example = given.example[:1]
        self.dims: Mapping[int, Any] = {axis: dim for axis, dim in given.dims.items() if axis > 0}
        if _is_sized(model):
            side = _square(model)
            self.example = self.example.new_zeros(1, self.example.shape[1], _HEIGHT * side, _WIDTH * side)
            self.dims = {axis: side * torch.export.Dim(name, min=1) for axis, name in ((2, "H"), (3, "W"))}

    def shape_of(self, given: torch.Tensor) -> tuple[int, int]:
        """Shape of the features of `given`."""
        with capture_settings(self._model), shapes_only(self._model):
            kind = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
            count, width = self.encoder(torch.empty(tuple(given.shape), dtype=kind))[0].shape
            return int(count), int(width)

    def prompt(self, given: torch.Tensor, _tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the whole model takes beside tokens."""
        if self._model.config.model_type in _TILED:
            return {self._name: given.unsqueeze(1)}
        sizes = {"image_sizes": torch.tensor([given.shape[2:]])} if _is_sized(self._model) else {}
        return {self._name: given, **sizes}


@final
class FeatureEncoder(nn.Module):
    """An image or a sound to the features that take the places of placeholders."""

    def __init__(self, model: PreTrainedModel, make: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self._make = make

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        """Give features [F, width] of an image or a sound [1, ...]."""
        features = self._make(self.model.base_model, values)
        joined = torch.cat(list(features), dim=0) if isinstance(features, (list, tuple)) else features
        return (joined.reshape(-1, joined.shape[-1]),)


def _by_method(model: PreTrainedModel, method: str) -> Callable[[Any, torch.Tensor], Any]:
    """Features by the method that transformers has for it. Raises ConfigError when it needs more than the image."""
    first, *others = signature(getattr(model.base_model, method)).parameters.values()
    kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    needed = [one.name for one in others if one.default is Parameter.empty and one.kind not in kinds]
    if needed == ["image_sizes"]:
        return lambda base, values: (
            getattr(base, method)(values, image_sizes=[tuple(values.shape[2:])], return_dict=True).pooler_output
        )
    if needed:
        raise refused(model, f"makes features of {first.name} by the values of {', '.join(needed)}")
    return lambda base, values: getattr(base, method)(values, return_dict=True).pooler_output


def _of_tile(base: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a model of the family
    """Features of a tile. The method of transformers leaves tiles out by their values: those that are zeros."""
    return base.connector(base.vision_model(pixel_values=values, return_dict=True).last_hidden_state)


def _of_masked_tile(base: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    hidden = base.vision_model(pixel_values=values, return_dict=True).last_hidden_state
    return base.connector(hidden, attention_mask=torch.ones(hidden.shape[:2], dtype=torch.bool))


def _sized(base: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Features of Mistral 3, without its split into those of each picture, by values."""
    sizes = [tuple(values.shape[2:])]
    hidden = base.vision_tower(values, image_sizes=sizes, output_hidden_states=True, return_dict=True).hidden_states
    layer = base.config.vision_feature_layer
    chosen = hidden[layer] if isinstance(layer, int) else torch.cat([hidden[at] for at in layer], dim=-1)
    return base.multi_modal_projector(chosen.squeeze(0), sizes)


_TILED: Final = frozenset({"idefics2", "idefics3", "smolvlm"})
_MAKERS: Final[Mapping[str, Callable[[Any, torch.Tensor], Any]]] = {
    "idefics2": _of_masked_tile,
    "idefics3": _of_tile,
    "mistral3": _sized,
    "smolvlm": _of_tile,
}
# Height and width of the example of a model that takes any, in squares.
_HEIGHT: Final = 2
_WIDTH: Final = 3


def _is_sized(model: PreTrainedModel) -> bool:
    """Whether pictures come with `image_sizes`, at their own size."""
    vision = getattr(model.config, "vision_config", None)
    return takes(model.forward, "image_sizes") and getattr(vision, "model_type", None) == "pixtral"


def _square(model: PreTrainedModel) -> int:
    """Side, in pixels, of what one feature stands for."""
    return int(model.config.vision_config.patch_size) * int(getattr(model.config, "spatial_merge_size", 1))
