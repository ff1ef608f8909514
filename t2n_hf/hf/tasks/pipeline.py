"""Models that are several graphs: which ones, and how they meet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from t2n_hf.errors import ConfigError
from t2n_hf.trace.interface import Interface

__all__ = ["ONE_GRAPH", "Pipeline"]

# Name of the only part of a model that is one graph.
ONE_GRAPH = "model"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The graphs of a model, in the order in which they run.

    An input of a part that has the name of an output of an earlier part takes that output; `out_cache_*` of one call
    is `in_cache_*` of the next one.

    Attributes:
        task: what the whole does ("text2text-generation").
        parts: name -> graph. A model that is one graph has the part `ONE_GRAPH`.
        answer: the model itself, as one piece, for the check: called with the inputs of the first part by name, and
            tokens [B, T] so far, it gives the logits of the next ones [B, V]. None when there is nothing to generate.
        start: tokens that a generation begins with, [1, T] i64, for the inputs of the first part by name.
        placeholder: the token that stands for a feature of an image or a sound; None in models of text.
    """

    task: str
    parts: Mapping[str, Interface]
    answer: Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor] | None = None
    start: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    placeholder: int | None = None

    def __post_init__(self) -> None:
        """Check that there is a graph. Raises ConfigError."""
        if not self.parts:
            raise ConfigError(f"a pipeline for {self.task} needs one graph at the least")

    @property
    def main(self) -> Interface:
        """The graph that stands for the model: the last one, which gives its answer."""
        return list(self.parts.values())[-1]
