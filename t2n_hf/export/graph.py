"""From an interface to the text of the graph and the plan of its weights; nothing is written here."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import sympy
import torch
from torch import fx, nn

from t2n_hf.contract import InferenceTarget
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.errors import ConfigError
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.formats import DENSE, WeightChoice, choose_formats, dense_reasons
from t2n_hf.export.lower import Lowered, WeightBinding, WeightFormatInfo, lower
from t2n_hf.export.reference import InputSpec
from t2n_hf.export.weights import PlannedWeight, Weight, plan_weight
from t2n_hf.garbage import collection_paused
from t2n_hf.nnef.dat import BLOCK_FORMATS
from t2n_hf.nnef.ir import Document
from t2n_hf.nnef.text import to_text
from t2n_hf.nnef.versions import LEAST_TARGET, least_version
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.walk import named_parameters_of, named_tensors_of

__all__ = ["Graph", "TensorShape", "make_graph"]


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """An input or output: `dtype` by tract name, `shape` in ints and texts such as "S+P"."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All that is to be written: graph.nnef, as a document and its text, the weights, and facts about both.

    `constants` are those weights, by label, that the model does not have: they were found in the capture.
    """

    document: Document
    text: str
    weights: tuple[PlannedWeight, ...]
    constants: Mapping[str, torch.Tensor]
    choices: Mapping[str, WeightChoice]
    dense: Mapping[str, str]
    specs: tuple[InputSpec, ...]
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    symbols: tuple[str, ...]
    least_tract: str = LEAST_TARGET
    fixed_shapes: bool = False
    reads: tuple[str, ...] = ()


@collection_paused()
def make_graph(interface: Interface, config: ExportConfig) -> Graph:
    """Capture, lower and plan.

    Raises ConfigError for a weight that has no values, MissingEmittersError listing every operator that cannot be
    exported, FormatError naming a weight that no `.dat` file can hold.
    """
    refuse_meta(interface.weight_owner)
    assert config.dtype is not None
    choices = choose_formats(interface.weight_owner, config)
    captured = capture(interface, getattr(torch, dtype_named(config.dtype).torch), config.capture)  # type: ignore[arg-type]
    formats = {
        name: WeightFormatInfo(choice.format, choice.transposed)
        for name, choice in choices.items()
        if choice.format != DENSE
    }
    lowered = lower(
        captured,
        formats,
        dtype=config.dtype,
        properties=_properties(interface),
        flat=config.flat,
        target=config.tract_version,
    )
    lengths = _Lengths({symbol: sympy.Symbol(name) for symbol, name in captured.symbols.items()})
    return Graph(
        document=lowered.document,
        text=to_text(lowered.document),
        weights=_plan(lowered, choices, interface.weight_owner, InferenceTarget(dtype=config.dtype)),
        constants={b.label: b.value for b in lowered.bindings if b.value is not None},
        choices=choices,
        dense=_dense(lowered, choices, interface.weight_owner),
        specs=tuple(_spec(node, name, lengths) for node, name in captured.inputs),
        inputs=tuple(_shape(node, name, lengths) for node, name in captured.inputs),
        outputs=tuple(_shape(node, name, lengths) for node, name in captured.outputs),
        symbols=tuple(lowered.document.symbols),
        least_tract=least_version(lowered.document),
        fixed_shapes=captured.fixed_shapes,
        reads=captured.reads,
    )


def refuse_meta(model: nn.Module) -> None:
    """Raise ConfigError when a parameter has no values here, because another library keeps them elsewhere."""
    if any(parameter.is_meta for _, parameter in named_parameters_of(model)):
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        raise ConfigError(
            f"{len(empty)} parameters of this {type(model).__name__} have no values here ({empty[0]}, ...): it was "
            "loaded with accelerate's own offloading, or built on meta. Export its checkpoint folder, or load it "
            "with from_pretrained(..., quantization_config=T2NConfig(weights='none'), device_map=...)"
        )


def _properties(interface: Interface) -> dict[str, str]:
    model_config = getattr(interface.weight_owner, "config", None)
    facts = {
        "producer": f"t2n_hf {version('t2n-hf')}",
        "torch_version": version("torch"),
        "transformers_version": version("transformers") if model_config is not None else None,
        "hf_model_type": getattr(model_config, "model_type", None),
        "task": interface.task or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _plan(
    lowered: Lowered, choices: Mapping[str, WeightChoice], owner: nn.Module, target: InferenceTarget
) -> tuple[PlannedWeight, ...]:
    values = dict(named_tensors_of(owner))
    return tuple(plan_weight(_weight(binding, choices, values), target) for binding in lowered.bindings)


def _weight(binding: WeightBinding, choices: Mapping[str, WeightChoice], values: Mapping[str, torch.Tensor]) -> Weight:
    if binding.fqn is None:
        assert binding.value is not None
        return Weight(
            label=binding.label, name=binding.label, value=binding.value, shape=tuple(binding.shape), finite=False
        )
    choice = choices.get(binding.fqn)
    quantize_as = choice.quantize_as if choice is not None and binding.format in BLOCK_FORMATS else None
    return Weight(
        label=binding.label,
        name=binding.fqn,
        value=values[binding.fqn],
        shape=tuple(binding.shape),
        format=binding.format,
        quantize_as=quantize_as,
    )


def _dense(lowered: Lowered, choices: Mapping[str, WeightChoice], owner: nn.Module) -> dict[str, str]:
    """Map the weights that are dense, though they were to be quantized, to the reason; each under its one name."""
    forced = {b.fqn: b.reason for b in lowered.bindings if b.fqn is not None and b.reason}
    reasons = {**dense_reasons(owner, choices), **forced}
    return {b.fqn: reasons[b.fqn] for b in lowered.bindings if b.fqn is not None and b.fqn in reasons}


class _Lengths:
    """Lengths in the archive's symbols, each written once: all caches of a model have the same few."""

    def __init__(self, names: Mapping[Any, sympy.Symbol]) -> None:
        self._names = names
        self._found: dict[Any, tuple[sympy.Expr, int | str]] = {}

    def of(self, length: torch.SymInt) -> tuple[sympy.Expr, int | str]:
        """Give a length as an expression, and as a number or a text."""
        asked = length.node.expr
        if asked not in self._found:
            found = asked.xreplace(self._names)
            self._found[asked] = found, int(found) if found.is_Integer else str(found).replace(" ", "")
        return self._found[asked]


def _spec(node: fx.Node, name: str, lengths: _Lengths) -> InputSpec:
    value = node.meta["val"]
    shape = tuple(d if isinstance(d, int) else lengths.of(d)[0] for d in value.shape)
    return InputSpec(name=name, dtype=dtype_of(value.dtype).name, shape=shape)


def _shape(node: fx.Node, name: str, lengths: _Lengths) -> TensorShape:
    value = node.meta["val"]
    shape = tuple(d if isinstance(d, int) else lengths.of(d)[1] for d in value.shape)
    return TensorShape(name=name, dtype=dtype_of(value.dtype).name, shape=shape)
