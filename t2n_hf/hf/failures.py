"""Saying in one error what went wrong with several weights."""

from collections.abc import Iterable

from t2n_hf.errors import T2NError

__all__ = ["raise_first"]


def raise_first(failures: Iterable[T2NError]) -> None:
    """Raise the first of `failures`, its message followed by those of the others; do nothing when there are none."""
    first, *others = [*failures, None]
    if first is not None and len(others) > 1:
        more = "; ".join(str(other) for other in others[:-1])
        raise type(first)(f"{first}. And {len(others) - 1} more: {more}") from first
    if first is not None:
        raise first
