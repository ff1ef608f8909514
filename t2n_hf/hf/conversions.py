"""The two operations that transformers runs on weights while it loads: quantize (or offload), and rebuild."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.hf.placing import Placing

__all__ = ["AsItIs", "PlaceWeights", "RebuildWeights", "is_ours", "with_parts"]


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
class AsItIs(ConversionOps):
    """Does nothing: a rule needs an operation."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: object
    ) -> dict[str, Any]:
        """Give the one tensor under the name of the target."""
        (value,) = input_dict.values()
        return {target_patterns[0]: value[0] if isinstance(value, list) else value}

    @property
    def reverse_op(self) -> ConversionOps:
        """The same."""
        return self


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


@final
class _HideParts(WeightRenaming):
    """First of all renamings: what is a part of a packed weight becomes a word that no other rule knows."""

    __slots__ = ("hidden", "is_part")

    def __init__(self, is_part: Callable[[str], bool], hidden: dict[str, str]) -> None:
        super().__init__("t2n_hf", "t2n_hf")
        self.is_part, self.hidden = is_part, hidden

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if not self.is_part(source_key):
            return source_key, None
        word = f"\0{len(self.hidden)}\0"
        self.hidden[word] = source_key
        return word, None


@final
class _ShowParts(WeightRenaming):
    """Last of all renamings: the word becomes the part's own name again, whatever was put around it."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: dict[str, str]) -> None:
        super().__init__("t2n_hf", "t2n_hf")
        self.hidden = hidden

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        start, stop = source_key.find("\0"), source_key.rfind("\0")
        return self.hidden.get(source_key[start : stop + 1], source_key), None


def with_parts(
    rules: Sequence[WeightTransform], rebuilding: Sequence[WeightConverter], is_part: Callable[[str], bool]
) -> list[WeightTransform]:
    """Join the model's own rules for names and weights with those that rebuild packed weights.

    Parts are stored under the names that the model itself has. The model's rules are for other names, and for values
    that can be split and merged: they must not see parts.
    """
    hidden: dict[str, str] = {}
    return [_HideParts(is_part, hidden), *rebuilding, *rules, _ShowParts(hidden)]


def is_ours(rule: WeightTransform) -> bool:
    """Say whether a rule is of this package, and no part of what the model's own rules do to names and weights."""
    if isinstance(rule, (_HideParts, _ShowParts)):
        return True
    return any(isinstance(operation, RebuildWeights | AsItIs) for operation in getattr(rule, "operations", ()))
