"""Keeping torch.compile out of what reads from disk: it runs as it is, between the parts that are compiled."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar, cast

import torch

__all__ = ["eagerly"]

_REASON: Final = "an offloaded weight is read from disk when it is used, which no graph can hold; leave fullgraph out"
_F = TypeVar("_F", bound=Callable[..., Any])


def eagerly(function: _F) -> _F:
    """Let `function`, and all that it calls, run outside of compiled graphs.

    `torch.compiler.disable` does this, and takes a second to import at first: it is asked only once something else has
    imported it, before which nothing can be compiled.
    """
    left_alone: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of the function
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not left_alone:
            left_alone.append(torch.compiler.disable(function, reason=_REASON))
        return left_alone[0](*args, **kwargs)

    # Dynamo asks for these where it meets the function, and says the reason.
    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    return cast(_F, run)
