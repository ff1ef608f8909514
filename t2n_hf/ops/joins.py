"""Joins (`concat`) that a value was written as."""

from collections.abc import Sequence
from typing import Final

from t2n_hf.nnef.ir import Assign, Name

__all__ = ["is_join"]

_OTHER_SHAPES: Final = frozenset({"reshape", "squeeze", "transpose", "unsqueeze"})


def is_join(body: Sequence[Assign], name: str) -> bool:
    """Whether the value of this name is a join, or one in another shape."""
    for assign in reversed(body):
        if name not in assign.results:
            continue
        if assign.op not in _OTHER_SHAPES or not isinstance(assign.args[0], Name):
            return assign.op == "concat"
        name = assign.args[0].text
    return False
