"""The two operations that transformers runs on weights while it loads: quantize (or offload), and rebuild."""

from typing import Any, final

import torch
from transformers.core_model_loading import ConversionOps

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.hf.placing import Placing

__all__ = ["PlaceWeights", "RebuildWeights"]


@final
class PlaceWeights(ConversionOps):
    """Quantizes a weight as it arrives, or leaves it on disk. One source tensor is alive at a time."""

    def __init__(self, placing: Placing) -> None:
        self.placing = placing

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlaceWeights":
        """Stay the same object: transformers copies operations, and what a copy learnt of the load would be lost."""
        return self

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        **_: object,
    ) -> dict[str, torch.Tensor]:
        """Place every weight of `input_dict`, full names to tensors, taking each out of it."""
        renamed_only = len(source_patterns or ()) == len(target_patterns or ()) == len(input_dict) == 1
        key = source_patterns[0] if renamed_only and source_patterns else None
        placed = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            placed[name] = self.placing.place(name, value[0] if isinstance(value, list) else value, key)
            del value
        return placed


@final
class RebuildWeights(ConversionOps):
    """Makes a packed weight of its stored parts."""

    def __init__(self, hf_quantizer: Any) -> None:  # noqa: ANN401 - the quantizer that imports this module
        # transformers looks for this name: parts of packed weights are not to be cast.
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> "RebuildWeights":
        """Stay the same object: see PlaceWeights."""
        return self

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **_: object,
    ) -> dict[str, torch.Tensor]:
        """Rebuild the weight `full_layer_name`; keys of `input_dict` are its last name with the part's behind it."""
        leaf = (target_patterns or [""])[0]
        parts = {
            key.removeprefix(f"{leaf}_"): value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
        }
        input_dict.clear()
        return {full_layer_name: self.hf_quantizer.rebuild(full_layer_name, parts)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Refuse: saving writes parts itself, and the rule is taken from the model when it is loaded."""
        raise UnsupportedOpError("stored parts are written by the quantizer; this rule has no reverse")
