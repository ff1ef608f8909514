"""The lines of a model that a node comes from, without what torch takes to ask for them.

A tracer of torch makes text of the whole stack for each node, and looks at all of its frames as objects: an eighth of
the time that a capture takes. Here only the frames that are kept are made text of, and each line once.
"""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import fx
from torch.fx import proxy as fx_proxy
from torch.fx.experimental.symbolic_shapes import uninteresting_files

__all__ = ["lines_noted"]

_ALSO: Final = str(torch.__file__)


@contextmanager
def lines_noted(tracer: Any, start: FrameType) -> Iterator[None]:  # noqa: ANN401 - torch's tracers have no public type
    """Let `tracer` note the lines that run below `start` in this way until the block is left, if it notes any.

    Its method is replaced on the tracer itself, which is of one trace: torch has no other way to say what a node gets.
    """
    if not getattr(tracer, "record_stack_traces", False) or "create_node" in vars(tracer):
        yield
        return
    create, write = tracer.create_node, _LineWriter(start)

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401 - what fx gives it
        node: fx.Node = create(*args, **kwargs)
        if "stack_trace" not in node.meta:
            text = write()
            if text:
                node.meta["stack_trace"] = text
        return node

    tracer.create_node, tracer.record_stack_traces = create_node, False
    try:
        yield
    finally:
        del tracer.create_node
        tracer.record_stack_traces = True


class _LineWriter:
    """Writes the frames of forwards on the stack, outermost first, as a traceback of Python does."""

    def __init__(self, start: FrameType) -> None:
        self._start = start
        self._skipped = uninteresting_files()
        self._anchors = getattr(fx_proxy, "_STACK_TRACE_ANCHORS", ())
        self._kept: dict[CodeType, bool] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}

    def __call__(self) -> str:
        lines: list[str] = []
        kept = self._kept
        frame = sys._getframe(2)
        while frame is not None and frame is not self._start:
            code = frame.f_code
            keep = kept.get(code)
            if keep is None:
                keep = kept[code] = self._keeps(code)
            if keep:
                lines.append(self._line(code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return "".join(reversed(lines)).strip()

    def _keeps(self, code: CodeType) -> bool:
        """Of the same frames as torch: forwards, and what its own functions are called by."""
        file, name = code.co_filename, code.co_name
        return (name == "forward" or file == _ALSO or (file, name) in self._anchors) and file not in self._skipped

    def _line(self, code: CodeType, number: int) -> str:
        if (code, number) not in self._lines:
            text = linecache.getline(code.co_filename, number).strip()
            where = f'  File "{code.co_filename}", line {number}, in {code.co_name}\n'
            self._lines[code, number] = where + (f"    {text}\n" if text else "")
        return self._lines[code, number]
