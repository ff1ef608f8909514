"""A model that answers in one call, from token ids and a mask, as a function of plain tensors."""

from typing import Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.settings import capture_settings, layer_lists, takes
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface

__all__ = ["encoder_interface"]

_BATCH: Final = 2
_LENGTH: Final = 5


@final
class _Encoder(nn.Module):
    """A model without a cache as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._output = output
        self._options = {"use_cache": False} if takes(model.forward, "use_cache") else {}

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`inputs` are [B, S] i64, in the order of the interface; returns the one output of the task."""
        outputs = self.model(**dict(zip(self._names, inputs, strict=True)), **self._options, return_dict=True)
        return (outputs[self._output],)


def encoder_interface(model: PreTrainedModel, task: Task, *, max_context: int | None) -> Interface:
    """Describe `model`, called once on padded batches [B, S]; `max_context` bounds S.

    Raises ConfigError for a model that takes no mask.
    """
    names = ["input_ids", "attention_mask"]
    if takes(model.forward, "token_type_ids") and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    missing = [name for name in names if not takes(model.forward, name)]
    if missing:
        raise ConfigError(f"{type(model).__name__}.forward takes no {', '.join(missing)}, which {task.name} needs")
    example = [torch.ones(_BATCH, _LENGTH, dtype=torch.int64) for _ in names]
    limit = {} if max_context is None else {"max": max_context}
    sizes = {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("S", min=1, **limit)}
    return Interface(
        module=_Encoder(model, tuple(names), task.output),
        args=(example,),
        dynamic_shapes=([sizes] * len(names),),
        input_names=tuple(names),
        output_names=(task.output,),
        asserts=("B >= 1", "S >= 1", *(() if max_context is None else (f"S < {max_context + 1}",))),
        layers=layer_lists(model),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context},
    )
