"""A model that answers in one call, from token ids, an image or a sound, as a function of plain tensors."""

import inspect
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.capturable.pooled_places import fewest_places
from t2n_hf.hf.tasks.inputs import ModelInput, drawn_inputs, main_input, token_inputs
from t2n_hf.hf.tasks.settings import capture_settings, layer_lists, outer_lists, takes
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.shapes import shapes_only

__all__ = ["encoder_interface"]

_TOKENS: Final = "input_ids"


@final
class _Encoder(nn.Module):
    """A model without a cache as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs
        self._names = names
        # XLNet's memory is cut to a length of its own.
        self._options = {name: False for name in ("use_cache", "use_mems") if takes(model.forward, name)}

    def results(self, inputs: list[torch.Tensor]) -> Any:  # noqa: ANN401 - a model output
        """Run the model on `inputs`, which are in the order of the interface."""
        return self.model(**dict(zip(self._names, inputs, strict=True)), **self._options, return_dict=True)

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Give the outputs of the task: of token ids [B, S] i64, an image or a sound, by what the model takes."""
        results = self.results(inputs)
        missing = [name for name in self.outputs if name not in results]
        if missing:
            raise ConfigError(
                f"{type(self.model).__name__} gives no {', '.join(missing)}; it gives {', '.join(results)}. Name "
                "another task ('feature-extraction'), or export it with example_args of its own"
            )
        return tuple(results[name] for name in self.outputs)


def encoder_interface(model: PreTrainedModel, task: Task, *, max_context: int | None) -> Interface:
    """Describe `model`, called once on batches [B, ...]; `max_context` bounds the tokens.

    Raises ConfigError for a model that takes what the task does not describe, or gives nothing that it exports.
    """
    inputs = _inputs(model, task, max_context)
    names = tuple(given.name for given in inputs)
    outputs = _outputs(model, task, names, inputs)
    dims = {dim.__name__: dim for given in inputs for dim in given.dims.values()}
    bounds = [f"{symbol} >= {dims[symbol].min if symbol == 'S' else 1}" for symbol in sorted(dims)]
    if max_context is not None and "S" in dims:
        bounds.append(f"S < {max_context + 1}")
    return Interface(
        module=_Encoder(model, names, outputs),
        args=([given.example for given in inputs],),
        dynamic_shapes=([dict(given.dims) for given in inputs],),
        input_names=names,
        output_names=outputs,
        asserts=tuple(bounds),
        layers=layer_lists(model) or tuple(f"model.{name}" for name in outer_lists(model, model)),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context if "S" in dims else None},
    )


def _inputs(model: PreTrainedModel, task: Task, longest: int | None) -> list[ModelInput]:
    batch = torch.export.Dim("B", min=1)
    main = getattr(model, "main_input_name", _TOKENS)
    if takes(model.forward, "spatial_shapes"):
        raise ConfigError(
            f"{type(model).__name__} takes pictures as patches, with a mask and spatial_shapes, which no task "
            "describes; export it with example_args, dynamic_shapes and names of its own"
        )
    if main != _TOKENS:
        return [main_input(model, main, batch), *drawn_inputs(model, batch)]
    names = [_TOKENS, "attention_mask"] if _masks(model) else [_TOKENS]
    if takes(model.forward, "token_type_ids") and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    missing = [name for name in names if not takes(model.forward, name)]
    if missing:
        raise ConfigError(f"{type(model).__name__}.forward takes no {', '.join(missing)}, which {task.name} needs")
    # CANINE sees characters in groups, of which the last one stands for all that is left.
    fewest = max(fewest_places(model), 2 * int(getattr(model.config, "downsampling_rate", None) or 0))
    if longest is not None and longest < fewest:
        raise ConfigError(f"max_context={longest}; {type(model).__name__} takes {fewest} tokens at the least")
    tokens = token_inputs(tuple(names), "S", longest, batch, fewest)
    compares = task.name == "zero-shot-image-classification" or "logit_scale" in model._parameters
    with_image = takes(model.forward, "pixel_values") and compares
    return [*tokens, main_input(model, "pixel_values", torch.export.Dim("I", min=1))] if with_image else tokens


def _masks(model: PreTrainedModel) -> bool:
    """Whether `model` takes a mask of any name; a text of FNet's sees all there is, padding or not."""
    return any(name.endswith("mask") for name in inspect.signature(model.forward).parameters)


def _outputs(model: PreTrainedModel, task: Task, names: tuple[str, ...], inputs: list[ModelInput]) -> tuple[str, ...]:
    """Those outputs of the task that the model gives."""
    if len(task.outputs) == 1:
        return task.outputs
    with capture_settings(model), shapes_only(model):
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        examples = [torch.ones(tuple(given.example.shape), dtype=given.example.dtype) for given in inputs]
        examples = [e.to(kind) if e.is_floating_point() else e for e in examples]
        results = _Encoder(model, names, ()).results(examples)
        tensors = [name for name, value in results.items() if isinstance(value, torch.Tensor)]
        given = tuple(name for name in task.outputs if name in tensors)
        given = given or tuple(name for name in task.instead if name in tensors)[:1]
    if not given:
        raise ConfigError(
            f"{type(model).__name__} gives none of {', '.join(task.outputs)}, the outputs of {task.name}; it gives "
            f"{', '.join(results)}. Name another task"
        )
    return given
