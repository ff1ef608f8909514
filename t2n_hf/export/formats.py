"""How each weight is written: as the model holds it, or quantized on the way out; and what stays dense, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from t2n_hf.contract import SupportsOffloadState
from t2n_hf.errors import ConfigError
from t2n_hf.export.config import ExportConfig
from t2n_hf.hf.config import NOT_QUANTIZED, T2NConfig
from t2n_hf.hf.plan import Choice, Plan, make_plan
from t2n_hf.hf.report import coverage_of
from t2n_hf.nnef.dat import BLOCK_FORMATS
from t2n_hf.registry import format_class
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.transposed import TransposedTensor
from t2n_hf.trace.walk import named_parameters_of

__all__ = ["DENSE", "WeightChoice", "choose_formats", "dense_reasons", "is_transformers_model"]

DENSE: Final = "dense"
_OPTIONS: Final = ("weights", "embeddings", "lm_head")


@dataclass(frozen=True, kw_only=True)
class WeightChoice:
    """How one weight is written.

    Attributes:
        format: "dense", or a block format of `.dat`.
        transposed: the `.dat` holds the last two axes the other way round.
        quantize_as: how to quantize it while exporting; None writes what is there.
        reason: why a weight is dense although the model holds it quantized, or it was to be; "" otherwise.
    """

    format: str = DENSE
    transposed: bool = False
    quantize_as: Choice | None = None
    reason: str = ""


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` carries a transformers configuration, so that its task says its interface."""
    return hasattr(getattr(model, "config", None), "to_diff_dict")


def choose_formats(model: nn.Module, config: ExportConfig) -> dict[str, WeightChoice]:
    """Decide for every parameter of `model`, by name (every name of a tied one).

    Raises ConfigError when `config` asks for a class that tract has no block format for.
    """
    plan = _plan_of(model, config)
    return {name: _choose(tensor, plan.get(name)) for name, tensor in named_parameters_of(model)}


def dense_reasons(model: nn.Module, choices: Mapping[str, WeightChoice]) -> dict[str, str]:
    """Map matrices that stay dense to the reason; {} when nothing was to be quantized."""
    ours = {name: choice.reason for name, choice in choices.items() if choice.reason}
    if not _was_to_be_quantized(model):
        return ours
    loaded = {name: why for name, why in coverage_of(model).dense.items() if why and choices[name].quantize_as is None}
    return {**loaded, **ours}


def _was_to_be_quantized(model: nn.Module) -> bool:
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return any(getattr(config, option, None) not in {None, NOT_QUANTIZED} for option in _OPTIONS)


_DENSE: Final = WeightChoice()


def _choose(tensor: torch.Tensor, asked: Choice | None) -> WeightChoice:
    if asked is None and type(tensor) is nn.Parameter:
        return _DENSE
    held, transposed = _held(tensor)
    if held is not None and held.EXPORT_FORMAT in BLOCK_FORMATS:
        return WeightChoice(format=held.EXPORT_FORMAT, transposed=transposed)
    if asked is not None and asked.format is not None:
        return WeightChoice(format=asked.format.EXPORT_FORMAT, transposed=asked.transposed, quantize_as=asked)
    if held is not None:
        return WeightChoice(reason=f"{held.OFFLOAD_STATE_TAG} has no block format that tract reads")
    return WeightChoice(reason=asked.reason if asked is not None and tensor.ndim > 1 else "")


def _held(tensor: torch.Tensor) -> tuple[type[SupportsOffloadState] | None, bool]:
    """Find the quantized class that holds a weight, through offloading and transposition; None for dense values."""
    if isinstance(tensor, OffloadedTensor) and tensor.inner_class is TransposedTensor:
        tensor = tensor.reload()
    if isinstance(tensor, TransposedTensor):
        return _held(tensor.inner)[0], True
    kind: Any = tensor.inner_class if isinstance(tensor, OffloadedTensor) else type(tensor)
    return (kind, False) if isinstance(kind, type) and issubclass(kind, SupportsOffloadState) else (None, False)


def _plan_of(model: nn.Module, config: ExportConfig) -> Plan:
    given = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name) is not None}
    wanted = {name: value for name, value in given.items() if value != NOT_QUANTIZED}
    for option, value in wanted.items():
        if format_class(value).EXPORT_FORMAT not in BLOCK_FORMATS:
            raise ConfigError(
                f"{option}={value!r} is no block format that tract reads ({', '.join(BLOCK_FORMATS)}); give a class "
                "that writes one, such as 'q4_0', or export the model as it is"
            )
    if not wanted:
        return {}
    if is_transformers_model(model):
        return make_plan(model, T2NConfig(**{"weights": NOT_QUANTIZED, **given}))
    if "lm_head" in wanted:
        raise ConfigError("lm_head is an option for language models of transformers; this module has none")
    return dict(_plan_of_module(model, wanted))


def _plan_of_module(model: nn.Module, wanted: Mapping[str, str]) -> Iterator[tuple[str, Choice]]:
    kinds = ((nn.Linear, wanted.get("weights")), (nn.Embedding, wanted.get("embeddings")))
    for path, module in model.named_modules():
        for kind, name in kinds:
            if isinstance(module, kind) and name is not None:
                chosen = format_class(name)
                refusal = chosen.refuses(tuple(module.weight.shape), module.weight.dtype)
                choice = Choice(reason=refusal) if refusal else Choice(format=chosen)
                yield (f"{path}.weight" if path else "weight"), choice
