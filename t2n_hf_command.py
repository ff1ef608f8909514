"""The `t2n-hf` program: it shows its help and its version at once, without torch and transformers.

It stands beside the package because importing anything of `t2n_hf` runs the package's `__init__`, which makes
transformers know T2NConfig: seconds, and of use to commands only.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["main", "only_help_follows"]

_QUICK: Final = {"--help", "--version"}


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    if _asks_little():
        bare = ModuleType("t2n_hf")
        bare.__path__ = [str(Path(__file__).with_name("t2n_hf"))]
        sys.modules["t2n_hf"] = bare
    importlib.import_module("t2n_hf.cli.main").main()


def only_help_follows() -> bool:
    """Whether Python imports `t2n_hf` because of `python -m t2n_hf`, for its help or its version."""
    # Until Python has found what to run, "-m" stands for the program.
    as_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :] == ["t2n_hf", *sys.argv[1:]]
    return as_module and _asks_little()


def _asks_little() -> bool:
    return set(sys.argv[1:]) <= _QUICK


if __name__ == "__main__":
    main()
