"""Naming at once all weights whose values cannot be exported, and not only the one that was written first."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from t2n_hf.errors import QuantizationError
from t2n_hf.export.parts import Part
from t2n_hf.hf.failures import raise_first

__all__ = ["raise_bad_values"]


def raise_bad_values(parts: Iterable[Part], scratch: Path) -> None:
    """Read every weight as if to write it, and raise one QuantizationError for all that are refused.

    Files in between are made in the folder `scratch`, and removed. Does nothing when no weight is refused.
    """
    raise_first(_failures(parts, scratch))


def _failures(parts: Iterable[Part], scratch: Path) -> Iterator[QuantizationError]:
    for weight in (weight for part in parts for weight in part.graph.weights):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            try:
                for _ in weight.open(Path(folder)).chunks():
                    pass
            except QuantizationError as error:
                yield error
