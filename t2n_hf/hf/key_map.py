"""Which names of a checkpoint go into which parameter, by the rules that transformers loads with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

__all__ = ["KeyMap", "map_keys"]


@dataclass(frozen=True)
class KeyMap:
    """`by_target`: parameter -> (pattern, key) of what it is made of, in loading order.

    Parameters that one rule makes together are listed under the first of them. `converters`: pattern -> its rule; a
    pattern that is not there is a key itself, whose tensor is only renamed.
    """

    by_target: dict[str, list[tuple[str, str]]]
    converters: dict[str, WeightConverter]


def map_keys(model: "PreTrainedModel", quantizer: "HfQuantizer | None", keys: Iterable[str]) -> KeyMap:
    """Do what the loader does with names: the same renamings and converters, in the same order."""
    rules = get_model_conversion_mapping(model, None, quantizer)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    order = {pattern: i for rule in converters for i, pattern in enumerate(rule.source_patterns)}
    known = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if target not in known and key in known:
            target, pattern = rename_source_key(key, [], [], prefix, known)
        found.setdefault(target, []).append((pattern or key, key))
    for entries in found.values():
        entries.sort(key=lambda entry: order.get(entry[0], 0))  # stable: the order within a pattern stays
    return KeyMap(found, {pattern: rule for rule in converters for pattern in rule.source_patterns})
