"""Rotary embeddings whose frequencies depend on the length, in a form that can be captured.

transformers writes the frequencies for the present length into a buffer, or branches on the length. While a graph is
captured, LongRoPE becomes a selection inside the graph between its two sets of frequencies (so that the graph is right
on both sides of the switch), and dynamic scaling stays at the frequencies that hold up to the trained length.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from t2n_hf.errors import ConfigError
from t2n_hf.trace.walk import attribute_of, names_of

__all__ = ["capturable_rotary", "rope_switch"]

_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")


def rope_switch(config: PreTrainedConfig) -> int | None:
    """Length up to which a LongRoPE model uses its short factors; None when the model has no LongRoPE.

    Keys that were cached on one side of the switch do not fit queries on the other.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    per_kind = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in (rope, *per_kind):
        if parameters.get("rope_type") == "longrope":
            return int(parameters["original_max_position_embeddings"])
    return None


@final
class _SwitchedRotary(nn.Module):
    """Calls a rotary embedding with the short or the long frequencies, by the last position."""

    def __init__(self, rotary: nn.Module, switch: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.switch = switch
        short: torch.Tensor = rotary.original_inv_freq  # type: ignore[assignment]
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, short.device, seq_len=switch + 1)
        self.short = nn.Buffer(short, persistent=False)
        self.long = nn.Buffer(long, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:  # noqa: ANN401 - what the inner one returns
        """`x` gives the dtype, `position_ids` are [B, S]; returns cos and sin as the inner module does."""
        is_long = position_ids[:, -1].amax(dim=0, keepdim=True) + 1 > self.switch
        frequencies = torch.where(is_long, self.long, self.short)
        return torch.func.functional_call(self.rotary, {"inv_freq": frequencies}, (x, position_ids))


@contextmanager
def capturable_rotary(model: nn.Module) -> Iterator[None]:
    """Give `model` rotary embeddings that can be captured; they are put back on any exit.

    Raises ConfigError for a model with length-dependent frequencies per kind of layer.
    """
    found: dict[str, Any] = {name: module for module, name in names_of(model).items() if _is_length_dependent(module)}
    original = {name: (module.rope_type, module.inv_freq) for name, module in found.items()}
    try:
        for name, module in found.items():
            kind, module.rope_type = module.rope_type, "default"
            if kind == "longrope":
                switch = int(module.config.rope_parameters["original_max_position_embeddings"])
                model.set_submodule(name, _SwitchedRotary(module, switch))
            else:
                module.inv_freq = module.original_inv_freq
        yield
    finally:
        for name, module in found.items():
            module.rope_type, module.inv_freq = original[name]
            model.set_submodule(name, module)


def _is_length_dependent(module: nn.Module) -> bool:
    kind = attribute_of(module, "rope_type")
    if isinstance(kind, Mapping):
        if any(_names_length(k) for k in kind.values()):
            raise ConfigError(
                f"{type(module).__name__} scales its frequencies by length, per kind of layer: unsupported"
            )
        return False
    return _names_length(kind)


def _names_length(kind: object) -> bool:
    # transformers compares "dynamic" by containment ("dynamic_ntk" existed), so does this.
    return isinstance(kind, str) and any(name in kind for name in _LENGTH_DEPENDENT)
