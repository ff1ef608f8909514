"""The Interface of a model, by its task."""

import torch
from transformers import PreTrainedModel

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.causal import causal_interface
from t2n_hf.hf.tasks.encoder import encoder_interface
from t2n_hf.hf.tasks.settings import context_of
from t2n_hf.hf.tasks.table import task_named, task_of_class, unsupported
from t2n_hf.trace.interface import Interface

__all__ = ["interface_of"]


def interface_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
) -> Interface:
    """Describe how `model` is exported. Nothing is run and no weight is read.

    Args:
        model: a model of transformers, in any state of loading.
        task: one of `TASKS`; None finds it by the class of the model.
        dtype: type of the numbers in the archive, hence of the caches.
        all_logits: give the logits of every new position instead of the last one's (text-generation only).
        max_context: bound on S + P (on S for encoders); None takes what the model was made for.

    Raises ConfigError for a model or a combination that is not supported; the text lists what is.
    """
    name = task or task_of_class(type(model).__name__, model.config)
    found = task_named(name)
    if model.config.is_encoder_decoder or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise unsupported(type(model).__name__, model.config)
    context = context_of(model, max_context)
    if found.name == "text-generation":
        return causal_interface(
            model, getattr(torch, dtype_of(dtype).torch), all_logits=all_logits, max_context=context
        )
    if all_logits:
        raise ConfigError(f"all_logits is for text-generation; task {name} has no choice of positions")
    return encoder_interface(model, found, max_context=context)
