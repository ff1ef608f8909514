"""The scope that says how opaque tensors compute, over what each is set to."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from t2n_hf.contract import COMPUTE_MODES
from t2n_hf.errors import ConfigError

__all__ = ["compute_mode", "overriding_compute"]

_COMPUTE: ContextVar[str | None] = ContextVar("t2n_hf_compute", default=None)


@contextmanager
def compute_mode(mode: str) -> Iterator[None]:
    """Let every opaque tensor compute "exact", "fast" or "compiled" inside this scope, whatever its own setting is.

    Raises ConfigError for another word.
    """
    if mode not in COMPUTE_MODES:
        raise ConfigError(f"compute={mode!r}; expected one of {', '.join(COMPUTE_MODES)}")
    token = _COMPUTE.set(mode)
    try:
        yield
    finally:
        _COMPUTE.reset(token)


def overriding_compute() -> str | None:
    """Say the mode of the innermost `compute_mode` scope, None outside any."""
    return _COMPUTE.get()
