"""Which version of tract runs what a document says: measured, with every wheel of the last two minor lines.

`scripts/tract_matrix.py` measures it again: it runs the cases of tests/ops with each wheel, and compares with PyTorch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from t2n_hf.errors import ConfigError
from t2n_hf.nnef.ir import Assign, Dim, Document, Name

__all__ = [
    "LEAST_TARGET",
    "PADDED_BOX_SINCE",
    "Need",
    "least_version",
    "needs_of",
    "parse_target",
    "since",
    "version_key",
]

LEAST_TARGET: Final = "0.23.0"
"""The least that archives are written for: 0.22 lacks `copy`, `any_reduce` and `all_reduce`, and scatters wrongly."""

PADDED_BOX_SINCE: Final = "0.23.6"
"""Earlier ones leave padding out of a mean (before 0.23.5, out of a sum too), without a word."""

# Operators that came later than LEAST_TARGET.
_SINCE: Final[Mapping[str, str]] = {
    "tract_core_grid_sample": "0.23.3",
    "tract_core_cumsum": "0.23.9",
}
_TARGET: Final = re.compile(r"tract\s*==\s*(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Need:
    """A version of tract, and what in a document needs that version or a later one."""

    version: str
    what: str


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers that compare as versions do."""
    return tuple(int(part) for part in version.split("."))


def since(operator: str) -> str:
    """The version of tract that an operator came with; LEAST_TARGET when it was there already."""
    return _SINCE.get(operator, LEAST_TARGET)


def parse_target(target: str) -> str:
    """The version of a target such as "tract==0.23.5".

    Raises ConfigError for another form, and for a version older than LEAST_TARGET.
    """
    found = _TARGET.fullmatch(target.strip())
    if found is None:
        raise ConfigError(f"target={target!r}; expected the form tract==X.Y.Z, such as tract=={LEAST_TARGET}")
    if version_key(found[1]) < version_key(LEAST_TARGET):
        raise ConfigError(f"target={target!r}; archives are written for tract {LEAST_TARGET} and later")
    return found[1]


def least_version(document: Document) -> str:
    """The least version of tract that runs a document."""
    return max((need.version for need in needs_of(document)), key=version_key, default=LEAST_TARGET)


def needs_of(document: Document) -> list[Need]:
    """What in a document needs more than LEAST_TARGET, each once."""
    bodies = [document.body, *(fragment.body for fragment in document.fragments)]
    needs = [need for body in bodies for assign in body for need in _needs(assign)]
    return list(dict.fromkeys([*needs, *(need for body in bodies for need in _joined_numbers(body))]))


def _needs(assign: Assign) -> Iterator[Need]:
    if assign.op in _SINCE:
        yield Need(_SINCE[assign.op], f"the operator {assign.op}")
    if assign.op == "box" and assign.kwargs.get("border") == "constant" and _is_padded(assign.kwargs):
        yield Need(PADDED_BOX_SINCE, "a mean or sum over padding")


def _joined_numbers(body: tuple[Assign, ...]) -> Iterator[Need]:
    """Uses of a number at free lengths with which earlier versions fail: where axes are moved around it."""
    filled: set[str] = set()
    for assign in body:
        given = [arg.text for arg in assign.args if isinstance(arg, Name)]
        if _is_number_at_free_lengths(assign) or (assign.op in ("squeeze", "unsqueeze") and filled.intersection(given)):
            filled.update(assign.results)
        elif assign.op == "concat" and any(name in filled for name in _joined(assign.args[0])):
            yield Need("0.23.9", "a join with a number at free lengths")
        elif assign.op == "matmul" and filled.intersection(given):
            yield Need("0.23.5", "a product with a number at free lengths")
        elif assign.op == "transpose" and filled.intersection(given):
            yield Need("0.23.5", "axes of a number at free lengths in another order")


def _joined(parts: Any) -> list[str]:  # noqa: ANN401 - an argument of the graph model
    return [part.text for part in parts if isinstance(part, Name)]


def _is_number_at_free_lengths(assign: Assign) -> bool:
    shape: Any = assign.kwargs.get("shape")
    number = assign.op == "tract_core_broadcast" and isinstance(assign.args[0], int | float)
    return number and any(isinstance(length, Dim) for length in shape)


def _is_padded(kwargs: Mapping[str, Any]) -> bool:
    return any(amount != 0 for pair in kwargs.get("padding", ()) for amount in pair)
