"""The graphs of a model, by its task."""

from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError, T2NError
from t2n_hf.garbage import collection_paused
from t2n_hf.hf.tasks.causal import CausalOptions, causal_interface
from t2n_hf.hf.tasks.encoder import encoder_interface
from t2n_hf.hf.tasks.encoder_decoder import encoder_decoder_pipeline
from t2n_hf.hf.tasks.multimodal import multimodal_pipeline, reads_more_than_text
from t2n_hf.hf.tasks.pipeline import ONE_GRAPH, Pipeline
from t2n_hf.hf.tasks.settings import context_of
from t2n_hf.hf.tasks.table import Task, task_named, task_of_model
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.shapes import own_line

__all__ = ["interface_of", "pipeline_of"]

_MULTIMODAL: Final = ("image-text-to-text", "audio-text-to-text")


@collection_paused()
def pipeline_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
    batch: bool = False,
    mask: bool = False,
) -> Pipeline:
    """Describe how `model` is exported, as one graph or as several. No weight is read.

    Args:
        model: a model of transformers, in any state of loading.
        task: one of `TASKS`; None finds it by the class of the model.
        dtype: type of the numbers in the archives, hence of the caches.
        all_logits: give the logits of every new position instead of the last one's (tasks that generate only).
        max_context: bound on S + P (on S for encoders); None takes what the model was made for.
        batch: take several sequences at once (text-generation; every other task always does).
        mask: take `attention_mask`, and `position_ids` where the model does, for sequences that are padded on the left
            (text-generation; every other task always takes a mask).

    Raises ConfigError for a model or a combination that is not supported; the text lists what is.
    """
    found = task_named(task or task_of_model(model))
    options = _Options(dtype=getattr(torch, dtype_of(dtype).torch), all_logits=all_logits, batch=batch, mask=mask)
    try:
        return _described(model, found, options, context_of(model, max_context))
    except T2NError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} is not what {found.name} knows: {type(error).__name__}: {error} (at "
            f"{own_line(error)}). Name another task, or export it with example_args, dynamic_shapes and names of its "
            "own"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Options:
    dtype: torch.dtype
    all_logits: bool
    batch: bool
    mask: bool


def _described(model: PreTrainedModel, task: Task, options: _Options, context: int | None) -> Pipeline:
    if task.name == "text-generation" and not model.config.is_encoder_decoder:
        causal = CausalOptions(
            dtype=options.dtype,
            all_logits=options.all_logits,
            max_context=context,
            batch=options.batch,
            mask=options.mask,
        )
        return Pipeline(task=task.name, parts={ONE_GRAPH: causal_interface(model, causal)})
    if options.batch or options.mask:
        raise ConfigError(f"batch and mask are for text-generation; an export for {task.name} takes both in any case")
    several = {"all_logits": options.all_logits, "max_context": context}
    if model.config.is_encoder_decoder and model.can_generate() and task.name != "feature-extraction":
        return encoder_decoder_pipeline(model, task, options.dtype, **several)  # type: ignore[arg-type]
    if task.name in _MULTIMODAL or (task.generates and reads_more_than_text(model)):
        return multimodal_pipeline(model, task, options.dtype, **several)  # type: ignore[arg-type]
    if options.all_logits:
        raise ConfigError(f"all_logits is for models that generate; task {task.name} has no choice of positions")
    return Pipeline(task=task.name, parts={ONE_GRAPH: encoder_interface(model, task, max_context=context)})


def interface_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
    batch: bool = False,
    mask: bool = False,
) -> Interface:
    """Describe a model that is one graph; the arguments are those of `pipeline_of`. No weight is read.

    Raises ConfigError as `pipeline_of` does, and for a model that is several graphs.
    """
    pipeline = pipeline_of(
        model, task=task, dtype=dtype, all_logits=all_logits, max_context=max_context, batch=batch, mask=mask
    )
    if set(pipeline.parts) != {ONE_GRAPH}:
        raise ConfigError(
            f"{type(model).__name__} is exported as several graphs ({', '.join(pipeline.parts)}): use pipeline_of"
        )
    return pipeline.main
