"""The graphs of a model, by its task."""

import torch
from transformers import PreTrainedModel

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.causal import causal_interface
from t2n_hf.hf.tasks.encoder import encoder_interface
from t2n_hf.hf.tasks.encoder_decoder import encoder_decoder_pipeline
from t2n_hf.hf.tasks.pipeline import ONE_GRAPH, Pipeline
from t2n_hf.hf.tasks.settings import context_of
from t2n_hf.hf.tasks.table import Task, task_named, task_of_class
from t2n_hf.trace.interface import Interface

__all__ = ["interface_of", "pipeline_of"]


def pipeline_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
) -> Pipeline:
    """Describe how `model` is exported, as one graph or as several. No weight is read.

    Args:
        model: a model of transformers, in any state of loading.
        task: one of `TASKS`; None finds it by the class of the model.
        dtype: type of the numbers in the archives, hence of the caches.
        all_logits: give the logits of every new position instead of the last one's (tasks that generate only).
        max_context: bound on S + P (on S for encoders); None takes what the model was made for.

    Raises ConfigError for a model or a combination that is not supported; the text lists what is.
    """
    found = task_named(task or task_of_class(type(model).__name__, model.config))
    context = context_of(model, max_context)
    numbers = getattr(torch, dtype_of(dtype).torch)
    if model.config.is_encoder_decoder and model.can_generate() and found.name != "feature-extraction":
        return encoder_decoder_pipeline(model, found, numbers, all_logits=all_logits, max_context=context)
    return Pipeline(
        task=found.name, parts={ONE_GRAPH: _one_graph(model, found, numbers, all_logits=all_logits, context=context)}
    )


def interface_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
) -> Interface:
    """Describe a model that is one graph; the arguments are those of `pipeline_of`. No weight is read.

    Raises ConfigError as `pipeline_of` does, and for a model that is several graphs.
    """
    pipeline = pipeline_of(model, task=task, dtype=dtype, all_logits=all_logits, max_context=max_context)
    if set(pipeline.parts) != {ONE_GRAPH}:
        raise ConfigError(
            f"{type(model).__name__} is exported as several graphs ({', '.join(pipeline.parts)}): use pipeline_of"
        )
    return pipeline.main


def _one_graph(
    model: PreTrainedModel, task: Task, dtype: torch.dtype, *, all_logits: bool, context: int | None
) -> Interface:
    if task.name == "text-generation":
        return causal_interface(model, dtype, all_logits=all_logits, max_context=context)
    if all_logits:
        raise ConfigError(f"all_logits is for models that generate; task {task.name} has no choice of positions")
    return encoder_interface(model, task, max_context=context)
