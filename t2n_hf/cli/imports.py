"""How a command is imported: most of the time and memory of a short one is that of modules."""

import gc
import importlib
from types import ModuleType

from t2n_hf.garbage import collection_paused

__all__ = ["import_command"]


def import_command(module: str) -> ModuleType:
    """Import the module of a command; in a process of its own, let no search for garbage look at modules again."""
    with collection_paused():
        command = importlib.import_module(module)
        if gc.get_freeze_count():  # `main` runs in a process of its own
            gc.freeze()
    return command
