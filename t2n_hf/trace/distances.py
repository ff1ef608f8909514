"""Distances between rows, without the choice that torch makes by their number while a model is captured.

`torch.cdist` multiplies matrices where there are more than 25 rows, and takes differences where there are fewer: a free
number of rows would be bound to one side of that. The numbers are the same but for rounding.
"""

from typing import Final

import torch

from t2n_hf.trace.swap import FunctionReplaced

__all__ = ["distances_of_any_rows"]

_CHOICE: Final = "use_mm_for_euclid_dist_if_necessary"
_MANY: Final = 25


def distances_of_any_rows() -> FunctionReplaced:
    """A mode in which `torch.cdist` of a free number of rows does not depend on it."""
    return FunctionReplaced(torch.cdist, _distances)


def _distances(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = _CHOICE) -> torch.Tensor:
    rows = (x1.shape[-2], x2.shape[-2])
    if compute_mode == _CHOICE and not all(isinstance(count, int) for count in rows):
        many = any(isinstance(count, int) and count > _MANY for count in rows)
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    return torch.cdist(x1, x2, p, compute_mode)
