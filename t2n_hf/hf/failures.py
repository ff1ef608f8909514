"""Saying in one error what went wrong with several weights."""

from collections.abc import Iterable
from typing import Final

from t2n_hf.errors import T2NError

__all__ = ["raise_first"]

_SHOWN: Final = 4


def raise_first(failures: Iterable[T2NError]) -> None:
    """Raise the first of `failures`, its message followed by those of some others; do nothing when there are none.

    A failure that sums up others counts as these, and each message is told once. Where they are many, the message says
    how many it leaves out; the attribute `each` of the error has all.
    """
    single = tuple({str(each): each for failure in failures for each in failure.each or (failure,)}.values())
    if len(single) == 1:
        raise single[0]
    if single:
        told, left_out = single[1:_SHOWN], len(single[_SHOWN:])
        more = "; ".join(str(other) for other in told)
        rest = f"; and {left_out} more like these" if left_out else ""
        error = type(single[0])(f"{single[0]}. And {len(single) - 1} more: {more}{rest}")
        error.each = single
        raise error from single[0]
