"""Fused experts: the loader's rule is applied to one expert at a time, so that no stack of floats is ever made."""

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter, WeightTransform

from t2n_hf.hf.conversions import AsItIs, PlaceWeights

__all__ = ["FusedConverter", "ItemwiseConverter", "fused_rules", "is_by_item", "itemwise"]


def is_by_item(operation: Any) -> bool:  # noqa: ANN401 - a ConversionOps
    """Whether an operation of the loader does to each index of the first axis the same, without the others."""
    if type(operation) is MergeModulelist:
        return bool(operation.dim == 0)
    if type(operation) is Concatenate:
        return operation.dim not in (0, -3) and operation.num_shards_attribute is None
    if type(operation) is Transpose:
        return not operation.check_dims and {operation.dim0, operation.dim1} <= {1, 2, -1, -2}
    return False


def itemwise(rule: WeightTransform) -> WeightTransform:
    """Give the rule that does the same as `rule`, one expert at a time where weights are quantized while they load."""
    if type(rule) is not WeightConverter or not all(map(is_by_item, rule.operations)):
        return rule
    if not any(type(operation) is MergeModulelist for operation in rule.operations):
        return rule
    sources, targets = list(rule._original_source_patterns), list(rule._original_target_patterns)
    result = ItemwiseConverter(sources, targets, rule.operations, rule.force_cpu)
    result.scope_prefix, result.base_model_prefix = rule.scope_prefix, rule.base_model_prefix
    return result


def fused_rules(names: Iterable[str]) -> list[WeightTransform]:
    """Give rules for the parameters `names`, stacks of experts that a checkpoint may have fused already."""
    ends = sorted({".".join(name.split(".")[-2:]) for name in names})
    return [FusedConverter(end, end, [AsItIs()]) for end in ends]


@final
class FusedConverter(WeightConverter):
    """A rule that changes nothing, but that experts are read from the file one at a time, as they are stored.

    Without it the loader would cast all of them at once.
    """

    __slots__ = ()

    def convert(
        self,
        layer_name: str,
        model: Any = None,  # noqa: ANN401 - as transformers calls it
        config: Any = None,  # noqa: ANN401
        hf_quantizer: Any = None,  # noqa: ANN401
        loading_info: Any = None,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Make the parameter `layer_name`."""
        place = self.quantization_operation
        found = place.placing.stored_items(layer_name) if isinstance(place, PlaceWeights) else None
        if isinstance(place, PlaceWeights) and found is not None:
            self.collected_tensors.clear()
            return {layer_name: place.placing.place_items(layer_name, *found)}
        converted: dict[str, Any] = super().convert(
            layer_name, model=model, config=config, hf_quantizer=hf_quantizer, loading_info=loading_info
        )
        return converted


@final
class ItemwiseConverter(WeightConverter):
    """A rule that stacks the weights of experts, and may also join and turn them."""

    __slots__ = ()

    def convert(
        self,
        layer_name: str,
        model: Any = None,  # noqa: ANN401 - as transformers calls it
        config: Any = None,  # noqa: ANN401
        hf_quantizer: Any = None,  # noqa: ANN401
        loading_info: Any = None,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Make the parameter `layer_name`; where it is to be quantized, without its float values side by side."""
        options = {"model": model, "config": config, "loading_info": loading_info}
        place = self.quantization_operation
        count = self._count()
        if isinstance(place, PlaceWeights) and place.placing.takes_items(layer_name, count):
            shape = tuple(place.placing.model.get_parameter(layer_name).shape)
            first = [self._item(0, layer_name, options)]
            if first[0] is not None and tuple(first[0].shape) == (1, *shape[1:]):
                values = self._items(first, count, layer_name, options)
                placed = place.placing.place_items(layer_name, count, values)
                self.collected_tensors.clear()
                return {layer_name: placed}
        converted: dict[str, Any] = super().convert(layer_name, hf_quantizer=hf_quantizer, **options)
        return converted

    def _count(self) -> int:
        """Number of experts; 0 when the patterns do not have one tensor of each, or they are in memory already."""
        groups = list(self.collected_tensors.values())
        count = len(groups[0]) if groups else 0
        apart = all(len(group) == count and all(map(callable, group)) for group in groups)
        return count if apart and len(groups) == len(self.source_patterns) else 0

    def _items(
        self, first: list[torch.Tensor | None], count: int, name: str, options: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Give each expert, the first one out of `first`; none is kept."""
        for number in range(count):
            item = first.pop() if first else self._item(number, name, options)
            assert item is not None
            yield item
            del item

    def _item(self, number: int, name: str, options: dict[str, Any]) -> torch.Tensor | None:
        """Apply the rule to one expert: (1, ...); None when something else than the parameter comes out."""
        patterns = list(self._original_source_patterns), list(self._original_target_patterns)
        rule: Any = self.copy(*patterns, operations=self.operations)
        for pattern, group in self.collected_tensors.items():
            rule.collected_tensors[pattern] = [group[number]]
        made = rule.convert(name, **options)
        value = made.get(name) if len(made) == 1 else None
        value = value[0] if isinstance(value, list) else value
        return value if isinstance(value, torch.Tensor) else None
