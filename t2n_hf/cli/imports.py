"""What a command imports, and what it does not: most of the time and memory of a short one is that of modules."""

import gc
import importlib
import sys
from contextlib import suppress
from types import ModuleType

from transformers.utils import is_scipy_available

from t2n_hf.garbage import collection_paused

__all__ = ["import_command"]


def import_command(module: str) -> ModuleType:
    """Import the module of a command, without what transformers takes along for training."""
    with collection_paused():
        _import_losses_without_scipy()
        command = importlib.import_module(module)
        if gc.get_freeze_count():  # `main` runs in a process of its own
            gc.freeze()
    return command


def _import_losses_without_scipy() -> None:
    """Let transformers' losses, which no command computes, do without scipy: 40 MB and a third of a second.

    They import it with every model where it is installed. Afterwards it is there for models that are made with it.
    """
    if "scipy" in sys.modules:
        return
    is_scipy_available.cache_clear()
    sys.modules["scipy"] = None  # type: ignore[assignment] # Python's own way to say that a module is not there
    try:
        with suppress(ImportError):  # where they are elsewhere, they import what they like
            importlib.import_module("transformers.loss.loss_utils")
    finally:
        del sys.modules["scipy"]
        is_scipy_available.cache_clear()
