"""Emitters that other distributions bring: entry points of the group `t2n_hf.ops`, whose names are overloads.

    [project.entry-points."t2n_hf.ops"]
    "my_library.rotate.default" = "my_distribution.emitters:rotate"

The name is what `str(overload)` gives. The function is imported when a captured graph calls the overload.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch

from t2n_hf.errors import TagClashError
from t2n_hf.ops.table import EMITTERS, Emitter, EmitterTable, place_of
from t2n_hf.registry import declared_function, declared_names

__all__ = ["OPS_GROUP", "declared_emitters"]

OPS_GROUP: Final = "t2n_hf.ops"


def declared_emitters(targets: Iterable[Any], table: EmitterTable = EMITTERS) -> dict[Any, Emitter]:
    """Import the declared emitters of the overloads among `targets`.

    Raises TagClashError for an overload that two distributions declare, or one and `table`; ConfigError for an emitter
    that does not load.
    """
    declared = set(declared_names(OPS_GROUP))
    overloads = {
        str(target): target
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and str(target) in declared
    }
    found = {}
    for name, overload in sorted(overloads.items()):
        emitter = declared_function(OPS_GROUP, name)
        known = table.get(overload)
        if emitter is not None and known is not None and known is not emitter:
            raise TagClashError(
                f"{name!r} in {OPS_GROUP} is declared by {place_of(emitter)}, and t2n_hf has {place_of(known)}; "
                "uninstall the distribution of the first, which is not needed any more"
            )
        if emitter is not None:
            found[overload] = emitter
    return found
