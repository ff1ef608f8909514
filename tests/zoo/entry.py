"""An entry of the zoo, and the kinds of subjects that it makes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
from torch import nn

__all__ = [
    "FAMILIES",
    "VOCABULARY",
    "Encoder",
    "Entry",
    "Generator",
    "PlainModule",
    "config_of",
    "plain_entry",
    "scaled",
    "token_ids",
]

FAMILIES: Final = ("decoder", "encoder", "encoder-decoder", "vision", "audio", "multimodal")
VOCABULARY: Final = 256
# Gain of a matrix (its standard deviation times the root of its inputs) and spread of an embedding, at the least.
_GAIN, _SPREAD = 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A causal language model, exported with its past as inputs and outputs.

    One `without_past` keeps nothing between calls, and takes the whole text at each of them.
    """

    model: nn.Module
    options: Mapping[str, Any] = field(default_factory=dict)
    without_past: bool = False


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A text model without a past, exported by its task: ids and padding mask in, `output` of the model out."""

    model: nn.Module
    output: str = "logits"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlainModule:
    """Any other model, exported from examples.

    Attributes:
        model: called with the tensors that `inputs` makes, by keyword, and with `options`.
        inputs: makes the inputs for the given value of each symbol.
        axes: which axes of which input have which symbol; the rest is fixed.
        traced: value of each symbol in the example.
        tested: other values, at which the archive is run.
        outputs: names (or places) of what is compared of the model's output.
        options: further keyword arguments of the model.
        least: least value of a symbol, 1 where nothing is said.
        most: largest value of a symbol.
    """

    model: nn.Module
    inputs: Callable[[Mapping[str, int]], dict[str, torch.Tensor]]
    axes: Mapping[str, Mapping[int, str]]
    traced: Mapping[str, int]
    tested: Sequence[Mapping[str, int]]
    outputs: Sequence[str] = ("logits",)
    options: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo: `make` builds its subject, always the same one."""

    name: str
    family: str
    make: Callable[[], Generator | Encoder | PlainModule]

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"{self.name}: family {self.family!r}; expected one of {', '.join(FAMILIES)}")


def plain_entry(
    name: str, family: str, make: Callable[[], nn.Module], sizes: Sequence[Mapping[str, int]], **facts: Any
) -> Entry:
    """Entry of a `PlainModule` of what `make` gives: the first of `sizes` is the example, `facts` are other fields."""

    def subject() -> PlainModule:
        torch.manual_seed(0)
        return PlainModule(model=scaled(make()), traced=sizes[0], tested=sizes[1:], **facts)

    return Entry(name=name, family=family, make=subject)


def config_of(name: str, options: Mapping[str, Any]) -> Any:
    """A configuration of transformers, by the name of its class."""
    return getattr(transformers, name)(**{key: value for key, value in options.items() if value is not None})


def built(name: str, config: Any, gain: float = _GAIN) -> nn.Module:
    """A model of transformers by the name of its class, in evaluation mode, with `scaled` weights."""
    torch.manual_seed(0)
    return scaled(getattr(transformers, name)(config), gain)


def scaled(model: nn.Module, gain: float = _GAIN) -> nn.Module:
    """Scale small matrices (to `gain` at the least) and embeddings up, and move vectors off their defaults, in place.

    With the usual initialisation logits are so flat that a wrong mask changes them by a thousandth.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
                continue
            least = _SPREAD if id(parameter) in embeddings else gain / _inputs_of(parameter) ** 0.5
            spread = float(parameter.std()) if parameter.numel() > 1 else least
            if spread == 0.0:
                parameter.add_(torch.randn_like(parameter), alpha=least / 4)
            elif spread < least:
                parameter.mul_(least / spread)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.add_(torch.randn_like(module.running_mean), alpha=0.2)
                module.running_var.mul_(torch.rand_like(module.running_var) + 0.5)
    return model.requires_grad_(False).eval()


def _inputs_of(parameter: torch.Tensor) -> int:
    """How many numbers each output of a matrix or kernel (outputs first) is a sum of."""
    return max(1, parameter[0].numel()) if parameter.dim() != 3 else max(parameter.shape[1:])


def token_ids(batch: int, length: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    """Random ids, [batch, length] i64, from 3 up: the smaller ones often mean padding, beginning and end."""
    generator = torch.Generator().manual_seed(seed + 31 * batch + length)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)
