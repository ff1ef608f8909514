"""How each weight is written: as the model holds it, or quantized on the way out; and what stays dense, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from t2n_hf.contract import SupportsOffloadState, WeightFormat
from t2n_hf.errors import ConfigError
from t2n_hf.export.config import ExportConfig
from t2n_hf.hf.config import NOT_QUANTIZED, T2NConfig
from t2n_hf.hf.plan import Choice, Plan, make_plan
from t2n_hf.nnef.dat import BLOCK_FORMATS
from t2n_hf.registry import format_class
from t2n_hf.tensor import OffloadedTensor, TransposedTensor

__all__ = ["DENSE", "WeightChoice", "choose_formats", "is_transformers_model"]

DENSE: Final = "dense"


@dataclass(frozen=True, kw_only=True)
class WeightChoice:
    """How one weight is written.

    Attributes:
        format: "dense", or a block format of `.dat`.
        transposed: the `.dat` holds the last two axes the other way round.
        quantize_with: class to quantize to while exporting; None writes what is there.
        reason: why a weight is dense that is quantized in the model, or was asked to be; "" otherwise.
    """

    format: str = DENSE
    transposed: bool = False
    quantize_with: type[WeightFormat] | None = None
    reason: str = ""


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` carries a transformers configuration, so that its task says its interface."""
    return hasattr(getattr(model, "config", None), "to_diff_dict")


def choose_formats(model: nn.Module, config: ExportConfig) -> dict[str, WeightChoice]:
    """Decide for every parameter of `model`, by name (every name of a tied one).

    Raises ConfigError when `config` asks for a class that tract has no block format for.
    """
    plan = _plan_of(model, config)
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: _choose(tensor, plan.get(name, Choice())) for name, tensor in parameters}


def _choose(tensor: torch.Tensor, asked: Choice) -> WeightChoice:
    held, transposed = _held(tensor)
    if held is not None and held.EXPORT_FORMAT in BLOCK_FORMATS:
        return WeightChoice(format=held.EXPORT_FORMAT, transposed=transposed)
    if asked.format is not None:
        return WeightChoice(format=asked.format.EXPORT_FORMAT, transposed=asked.transposed, quantize_with=asked.format)
    if held is not None:
        return WeightChoice(reason=f"{_short_name(held)} has no block format that tract reads")
    return WeightChoice(reason="" if asked.by_user else asked.reason)


def _short_name(held: type[SupportsOffloadState]) -> str:
    return held.OFFLOAD_STATE_TAG


def _held(tensor: torch.Tensor) -> tuple[type[SupportsOffloadState] | None, bool]:
    """Find the quantized class that holds a weight, through offloading and transposition; None for dense values."""
    kind: Any = tensor.inner_class if isinstance(tensor, OffloadedTensor) else type(tensor)
    transposed = False
    if isinstance(tensor, TransposedTensor):
        kind, transposed = type(tensor.inner), True
    if isinstance(kind, type) and issubclass(kind, SupportsOffloadState):
        return kind, transposed
    return None, False


def _plan_of(model: nn.Module, config: ExportConfig) -> Plan:
    options = {name: getattr(config, name) for name in ("weights", "embeddings", "lm_head")}
    wanted = {name: value for name, value in options.items() if value not in {None, NOT_QUANTIZED}}
    for option, value in wanted.items():
        if format_class(value).EXPORT_FORMAT not in BLOCK_FORMATS:
            raise ConfigError(
                f"{option}={value!r} is no block format that tract reads; a loaded model can be exported to "
                f"{', '.join(BLOCK_FORMATS)}, or left as it is"
            )
    if not wanted:
        return {}
    if is_transformers_model(model):
        return make_plan(model, T2NConfig(**{"weights": NOT_QUANTIZED, **options_given(options)}))
    return dict(_plan_of_module(model, options))


def options_given(options: Mapping[str, str | None]) -> dict[str, str]:
    """Leave out what nobody asked for."""
    return {name: value for name, value in options.items() if value is not None}


def _plan_of_module(model: nn.Module, options: Mapping[str, str | None]) -> Iterator[tuple[str, Choice]]:
    if options["lm_head"] is not None:
        raise ConfigError("lm_head is an option for language models of transformers; this module has none")
    kinds = ((nn.Linear, options["weights"]), (nn.Embedding, options["embeddings"]))
    for path, module in model.named_modules():
        for kind, wanted in kinds:
            if isinstance(module, kind) and wanted not in {None, NOT_QUANTIZED}:
                chosen = format_class(str(wanted))
                refusal = chosen.refuses(tuple(module.weight.shape), module.weight.dtype)
                choice = Choice(reason=refusal) if refusal else Choice(format=chosen)
                yield (f"{path}.weight" if path else "weight"), choice
