"""A causal language model as tract's own tools expect it.

Token ids and one cache tensor per key and value in, logits and the grown caches out, with the symbols S (new tokens)
and P (past tokens).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches import WholeCache, cache_parameter, cache_shapes
from t2n_hf.hf.rotary import rope_switch
from t2n_hf.hf.tasks.settings import capture_settings, layer_lists, takes
from t2n_hf.trace.interface import Interface

__all__ = ["causal_interface"]

# Lengths of the example: they differ from each other, and rarely equal a dimension of a model.
_NEW: Final = 5
_PAST: Final = 6


@final
class _CausalLM(nn.Module):
    """A causal language model as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, cache_name: str, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_name
        self._all_logits = all_logits
        self._keeps = takes(model.forward, "logits_to_keep")

    def forward(self, input_ids: torch.Tensor, caches: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run S new tokens after P past ones.

        `input_ids` is [1, S] i64, `caches` are keys and values by turns, [1, H, P, D]. Returns the logits, then the
        caches grown to [1, H, P+S, D].
        """
        cache = WholeCache(caches)
        arguments = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        if self._keeps:
            arguments["logits_to_keep"] = 0 if self._all_logits else 1
        with _last_position_only(None if self._keeps or self._all_logits else self.model.get_output_embeddings()):
            logits = self.model(input_ids=input_ids, **arguments).logits
        return (logits, *cache.tensors())


@contextmanager
def _last_position_only(head: nn.Module | None) -> Iterator[None]:
    """Let `head` see only the last position of what it is given."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def causal_interface(
    model: PreTrainedModel, dtype: torch.dtype, *, all_logits: bool, max_context: int | None
) -> Interface:
    """Describe `model` with its key/value cache as inputs and outputs, the logits first.

    `dtype` is that of the caches, `max_context` bounds S + P. Raises ConfigError for a model without such a cache.
    """
    cache_name = cache_parameter(model.forward)
    if cache_name is None:
        raise ConfigError(f"{type(model).__name__} takes no key/value cache, which text-generation needs")
    shapes = cache_shapes(model.config)
    caches = [torch.zeros(side(_PAST), dtype=dtype) for shape in shapes for side in (shape.key, shape.value)]
    # A Dim cannot say S + P <= N. Models that cut a table at S + P want each of them to leave room for the other.
    limit = {} if max_context is None else {"max": max(_NEW + _PAST, max_context - 2)}
    new, past = torch.export.Dim("S", min=1, **limit), torch.export.Dim("P", min=0, **limit)
    sides = [f"{side}_{i}" for i in range(len(shapes)) for side in ("key", "value")]
    bound = () if max_context is None else (f"S+P < {max_context + 1}",)
    return Interface(
        module=_CausalLM(model, cache_name, all_logits=all_logits),
        args=(torch.zeros(1, _NEW, dtype=torch.int64), caches),
        dynamic_shapes=({1: new}, [{2: past}] * len(caches)),
        input_names=("input_ids", *(f"in_cache_{side}" for side in sides)),
        output_names=("outputs", *(f"out_cache_{side}" for side in sides)),
        asserts=("P >= 0", "S >= 1", *bound, "tg: S==1", "pp: P==0"),
        layers=layer_lists(model),
        task="text-generation",
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context, "all_logits": all_logits, "rope_switch": rope_switch(model.config)},
    )
