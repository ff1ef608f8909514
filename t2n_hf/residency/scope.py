"""Which pool serves reads that name none: a context variable, so that scopes nest and end.

A new thread starts without any scope; a pool that all threads should find is bound to its tensors instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from t2n_hf.residency.serving import ServingPool

__all__ = ["ActiveScope", "active_pool", "active_scope", "entered"]


@dataclass(frozen=True)
class ActiveScope:
    """A pool in scope, and the device that it loads to (None: that of each tensor)."""

    pool: ServingPool
    device: torch.device | None


_ACTIVE: ContextVar[ActiveScope | None] = ContextVar("t2n_hf_active_residency_scope", default=None)


def active_scope() -> ActiveScope | None:
    """Give the innermost scope of this context, None outside of any."""
    return _ACTIVE.get()


def active_pool() -> ServingPool | None:
    """Give the pool of the innermost scope of this context, None outside of any."""
    scope = _ACTIVE.get()
    return scope.pool if scope else None


@contextmanager
def entered(scope: ActiveScope) -> Iterator[None]:
    """Make `scope` the innermost one until the block ends."""
    token = _ACTIVE.set(scope)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
