"""Where in a model's code a node of a captured graph comes from."""

import re
from typing import Final

from torch import fx

__all__ = ["module_of", "python_name", "source_line"]

_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_TARGET: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\s*,\s*[A-Za-z_]\w*)*(?:\s*:[^=]+)?\s*[-+*/@]?=(?!=)")
_LIBRARY: Final = ("/torch/nn/", "/torch/functional.py", "/torch/_tensor.py")


def module_of(node: fx.Node) -> str:
    """Name of the module that a node comes from, as the capture recorded it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def source_line(node: fx.Node) -> str:
    """`file:line: code` of the innermost line of a model, torch's own modules left out, that a node comes from."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    outside = [frame for frame in frames if not any(part in frame["file"] for part in _LIBRARY)]
    if not frames:
        return ""
    frame = (outside or frames)[-1]
    return f"{frame['file']}:{frame['line']}: {frame['code'].strip()}"


def python_name(node: fx.Node) -> str:
    """A name for a value: the variable it is assigned to in the model, its module, or its operator."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if frames and not any(part in frames[-1]["file"] for part in _LIBRARY):
        target = _TARGET.match(frames[-1]["code"].strip())
        if target is not None and target["name"] != "_":
            return target["name"]
    module = module_of(node).rpartition(".")[2]
    return module if module.isidentifier() else re.sub(r"_\d+$", "", node.name)
