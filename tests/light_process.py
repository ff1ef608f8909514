"""Run code in a process that imports single modules of t2n_hf without the package's own imports, which take seconds."""

import sys
from pathlib import Path

import t2n_hf

_STAND_IN = """
import sys
sys.modules["t2n_hf"] = type(sys)("t2n_hf")
sys.modules["t2n_hf"].__path__ = [sys.argv.pop(1)]
"""


def light_command(code: str, *arguments: object) -> list[str]:
    """The command line; `code` finds `arguments` from sys.argv[1] on."""
    return [sys.executable, "-c", _STAND_IN + code, str(Path(t2n_hf.__file__).parent), *map(str, arguments)]
