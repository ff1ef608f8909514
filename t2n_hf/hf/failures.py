"""Saying in one error what went wrong with several weights."""

from collections.abc import Iterable

from t2n_hf.errors import T2NError

__all__ = ["raise_first"]


def raise_first(failures: Iterable[T2NError]) -> None:
    """Raise the first of `failures`, its message followed by those of the others; do nothing when there are none.

    A failure that sums up others counts as these, and each message is told once.
    """
    single = {str(each): each for failure in failures for each in failure.each or (failure,)}
    first, *others = [*single.values(), None]
    if first is not None and len(others) > 1:
        more = "; ".join(str(other) for other in others[:-1])
        error = type(first)(f"{first}. And {len(others) - 1} more: {more}")
        error.each = tuple(single.values())
        raise error from first
    if first is not None:
        raise first
