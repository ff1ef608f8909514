"""What models of each kind take beside token ids: images, waveforms, features; examples with their free lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.settings import takes

__all__ = ["ModelInput", "drawn_inputs", "main_input", "token_inputs"]

_BATCH: Final = 2
_TOKENS: Final = 5
# Samples and frames of the examples; shorter sounds are less than the convolutions of some models take.
_SAMPLES: Final = 4000
_FRAMES: Final = 96
_FEWEST_SAMPLES: Final = 1600
_FEWEST_FRAMES: Final = 32
# Side of the image when the configuration does not say: what models on ImageNet are trained on.
_IMAGE_SIDE: Final = 224


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """An input of a model: an example (its values are not read), and its free lengths by axis.

    `length` is the symbol of the length that the encoder's output has or follows from; None when it is fixed.
    """

    name: str
    example: torch.Tensor
    dims: Mapping[int, Any] = field(default_factory=dict)
    length: str | None = None


def token_inputs(
    names: tuple[str, ...],
    symbol: str,
    longest: int | None,
    batch: Any,  # noqa: ANN401 - a Dim
    fewest: int = 1,
) -> list[ModelInput]:
    """Token ids, masks and the like, [B, length] i64, that share the length `symbol`, `fewest` to `longest`."""
    limit = {} if longest is None else {"max": longest}
    length = torch.export.Dim(symbol, min=fewest, **limit)
    # So many that those that are pooled of them are not one alone: torch would take that for a fixed length.
    tokens = max(_TOKENS, 2 * fewest + 1)
    tokens = tokens if longest is None else min(tokens, max(longest, fewest + 1))
    examples = [torch.ones(_BATCH, tokens, dtype=torch.int64) for _ in names]  # one object would be one input
    return [
        ModelInput(name=name, example=example, dims={0: batch, 1: length}, length=symbol)
        for name, example in zip(names, examples, strict=True)
    ]


def main_input(model: PreTrainedModel, name: str, batch: Any) -> ModelInput:  # noqa: ANN401 - a Dim
    """The image or sound that `model` takes as `name`, with `batch` free.

    Raises ConfigError for an input that nothing is known of.
    """
    if name == "pixel_values":
        shape = (_BATCH, *image_shape(model.config))
        return ModelInput(name=name, example=torch.zeros(shape), dims={0: batch})
    if name == "input_values":
        frames, mels = getattr(model.config, "max_length", None), getattr(model.config, "num_mel_bins", None)
        if mels is not None and isinstance(frames, int):  # spectrograms of one length
            return ModelInput(name=name, example=torch.zeros(_BATCH, frames, mels), dims={0: batch})
        return _sound(name, (_BATCH, _SAMPLES), _FEWEST_SAMPLES, batch)
    if name == "input_features":
        return _features(model, batch)
    raise ConfigError(
        f"{type(model).__name__} takes {name!r}, which no task describes; export it with example_args, "
        "dynamic_shapes and names of its own"
    )


def drawn_inputs(model: PreTrainedModel, batch: Any) -> list[ModelInput]:  # noqa: ANN401 - a Dim
    """What `model` would draw at random: the order of a masked autoencoder's patches, [B, patches] f32.

    Patches are seen in the order of their `noise`, and the last ones, `mask_ratio` of all, are not.
    """
    patches = [getattr(m, "patch_embeddings", None) for m in model.modules() if hasattr(m, "random_masking")]
    counts = [count for count in (getattr(part, "num_patches", None) for part in patches) if isinstance(count, int)]
    if not counts or not takes(model.forward, "noise"):
        return []
    return [ModelInput(name="noise", example=torch.zeros(_BATCH, counts[0]), dims={0: batch})]


def image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model was made for."""
    for part in _with_sub_configs(config):
        side = getattr(part, "image_size", None) or getattr(part, "input_size", None)
        if side is not None:
            channels = getattr(part, "num_channels", None) or getattr(part, "in_channels", None) or 3
            height, width = _height_and_width(side)
            return channels, _whole_windows(part, height), _whole_windows(part, width)
    channels = next((c for c in (getattr(p, "num_channels", None) for p in _with_sub_configs(config)) if c), 3)
    return channels, _IMAGE_SIDE, _IMAGE_SIDE


def _whole_windows(config: PreTrainedConfig, pixels: int) -> int:
    """`pixels`, or as many more as fill the last window: RF-DETR's backbone was made for other images than it gets."""
    patch, windows = getattr(config, "patch_size", None), getattr(config, "num_windows", None)
    step = patch * windows if isinstance(patch, int) and isinstance(windows, int) else 1
    return -(-pixels // step) * step


def _height_and_width(side: Any) -> tuple[int, int]:  # noqa: ANN401 - what a config holds
    if isinstance(side, Mapping):
        return int(side["height"]), int(side["width"])
    return (int(side[0]), int(side[1])) if isinstance(side, (list, tuple)) else (int(side), int(side))


def _with_sub_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The parts of a configuration that may speak of images or sounds, the most special first."""
    names = ("vision_config", "audio_config", "encoder_config", "encoder", "backbone_config")
    parts = [part for part in (getattr(config, name, None) for name in names) if isinstance(part, PreTrainedConfig)]
    return [*parts, config]


def _features(model: PreTrainedModel, batch: Any) -> ModelInput:  # noqa: ANN401 - a Dim
    for part in _with_sub_configs(model.config):
        mels, positions = getattr(part, "num_mel_bins", None), getattr(part, "max_source_positions", None)
        strides = _front_strides(model, mels)
        if (
            mels is not None and strides is not None and positions is not None
        ):  # Whisper's encoder takes one length only
            example = torch.zeros(_BATCH, mels, positions * strides)
            return ModelInput(name="input_features", example=example, dims={0: batch})
        width = getattr(part, "input_feat_per_channel", None) or mels
        width = width or getattr(part, "feature_projection_input_dim", None)  # Wav2Vec2-BERT's
        if width is not None:
            halvings = getattr(part, "num_conv_layers", None)  # Speech2Text's, and its positions count what is left
            longest = None if positions is None or halvings is None else positions << halvings
            return _sound("input_features", (_BATCH, _FRAMES, width), _FEWEST_FRAMES, batch, longest)
    raise ConfigError(f"the configuration of {type(model).__name__} does not say how wide its input_features are")


def _front_strides(model: PreTrainedModel, mels: int | None) -> int | None:
    """Frames per position of an encoder that begins with two convolutions over mel bands; None for any other."""
    for module in model.modules():
        first, second = getattr(module, "conv1", None), getattr(module, "conv2", None)
        if isinstance(first, torch.nn.Conv1d) and isinstance(second, torch.nn.Conv1d) and first.in_channels == mels:
            return first.stride[0] * second.stride[0]
    return None


def _sound(
    name: str,
    shape: tuple[int, ...],
    fewest: int,
    batch: Any,  # noqa: ANN401 - a Dim
    longest: int | None = None,
) -> ModelInput:
    limit = {} if longest is None else {"max": longest}
    length = torch.export.Dim("N", min=fewest, **limit)
    return ModelInput(name=name, example=torch.zeros(shape), dims={0: batch, 1: length}, length="N")
