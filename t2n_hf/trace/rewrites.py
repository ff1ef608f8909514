"""Modules that run other code while they are captured: entry points of the group `t2n_hf.rewrites`.

    [project.entry-points."t2n_hf.rewrites"]
    "my_library.layers.Recurrence" = "my_distribution.rewrites:recurrence"

The name is that of a module's class: its module and qualified name. The function takes the module and then what the
class's own `forward` takes, gives what that gives, and uses the module's parameters by their names. It stands for
`forward` while a model is captured, and never otherwise: the check of an export runs the model's own code.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from torch import nn

from t2n_hf.registry import declared_function, declared_names
from t2n_hf.trace.swap import methods_replaced

__all__ = ["REWRITES_GROUP", "rewrites_used"]

REWRITES_GROUP: Final = "t2n_hf.rewrites"


@contextmanager
def rewrites_used(model: nn.Module) -> Iterator[None]:
    """Let modules of `model` run the rewrites that are declared for their classes; all are as before after any exit.

    A rewrite is for one class, not for those derived from it. It is imported when the model has a module of the class.

    Raises TagClashError for a class with rewrites of two distributions, ConfigError for one that does not load.
    """
    declared = set(declared_names(REWRITES_GROUP))
    with ExitStack() as stack:
        for module in model.modules() if declared else ():
            name = f"{type(module).__module__}.{type(module).__qualname__}"
            rewrite = declared_function(REWRITES_GROUP, name) if name in declared else None
            if rewrite is not None:
                stack.enter_context(methods_replaced(module, {"forward": rewrite}))
        yield
