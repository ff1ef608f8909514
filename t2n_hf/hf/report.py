"""What became of each weight: its format, its bytes, its error, where it lives, and why it stayed float."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from t2n_hf.contract import SupportsOffloadState, Tag
from t2n_hf.dtypes import DTYPES
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.weights import held_nbytes, tied_names
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["CoverageReport", "WeightGroup", "WeightRow", "coverage_of", "format_of"]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """One weight.

    `format` is the short name of its class, or its dtype in tract ("f32"; in torch, if tract has it not); `nbytes` what
    it takes in memory when it is read; `where` is "memory" or "disk"; `reason` says why it is not quantized; `by_user`
    that an option or its nature (a vector) is the reason. `relative_error` is ||w - q|| / ||w||, measured on some of
    its rows when it was quantized; None of a weight that is not, or was quantized by another load: nothing is known
    then of what it was.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    where: str
    quantized: bool
    reason: str = ""
    by_user: bool = False
    relative_error: float | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Weights of numbered layers that are alike: one name, in which "*" stands for the number.

    `rows` are those weights; they share class of module, shape, format, place and reason.
    """

    name: str
    rows: tuple[WeightRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(row.nbytes for row in self.rows)

    @property
    def errors(self) -> tuple[float, float] | None:
        """The smallest and the largest relative error; None when none is known."""
        known = [row.relative_error for row in self.rows if row.relative_error is not None]
        return (min(known), max(known)) if known else None


@dataclass(frozen=True)
class CoverageReport:
    """Every weight of a model, tied ones once."""

    rows: tuple[WeightRow, ...]

    @property
    def dense(self) -> dict[str, str]:
        """Names of the matrices that stayed float, each with the reason."""
        return {row.name: row.reason for row in self.rows if not row.quantized and len(row.shape) > 1}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(row.nbytes for row in self.rows)

    @property
    def share(self) -> float:
        """Quantized values over those that could be: all but vectors and what options leave out. 1.0 of none."""
        counted = [(math.prod(row.shape), row.quantized) for row in self.rows if row.quantized or not row.by_user]
        total = sum(count for count, _ in counted)
        return sum(count for count, done in counted if done) / total if total else 1.0

    def by_format(self) -> dict[str, tuple[int, int]]:
        """Map each format to its number of weights and their bytes, the largest first."""
        counts, sizes = Counter[str](), Counter[str]()
        for row in self.rows:
            counts[row.format] += 1
            sizes[row.format] += row.nbytes
        return {name: (counts[name], size) for name, size in sizes.most_common()}

    def groups(self) -> list[WeightGroup]:
        """Put weights of numbered layers together, in the order of the model."""
        found: dict[tuple[Any, ...], list[WeightRow]] = {}
        for row in self.rows:
            kind = (row.module, row.shape, row.format, row.where, row.reason)
            found.setdefault((_NUMBER.sub("*", row.name), *kind), []).append(row)
        return [WeightGroup(name=key[0], rows=tuple(rows)) for key, rows in found.items()]

    def main_reasons(self, limit: int = 3) -> list[str]:
        """Give the reasons that keep most values float, an example with each."""
        values: Counter[str] = Counter()
        example: dict[str, str] = {}
        for row in self.rows:
            if not row.quantized and not row.by_user:
                values[row.reason] += math.prod(row.shape)
                example.setdefault(row.reason, row.name)
        return [f"{reason} (e.g. {example[reason]})" for reason, _ in values.most_common(limit)]

    def __str__(self) -> str:
        lines = [f"{'format':<12}{'weights':>9}{'bytes':>16}"]
        lines += [f"{name:<12}{count:>9}{size:>16,}" for name, (count, size) in self.by_format().items()]
        groups = self.groups()
        packed = [group for group in groups if group.rows[0].quantized]
        if packed:
            lines += ["quantized:", *_table(packed)]
        dense = [group for group in groups if not group.rows[0].quantized and len(group.rows[0].shape) > 1]
        if dense:
            lines.append("stayed float:")
        for group in dense:
            count = f" ({len(group.rows)})" if len(group.rows) > 1 else ""
            lines.append(f"  {group.name}{count}: {group.rows[0].reason or 'no reason recorded'}")
        return "\n".join(lines)


def _table(groups: list[WeightGroup]) -> Iterator[str]:
    width = max(len(group.name) for group in groups)
    yield f"  {'weight':<{width}}{'count':>7}  {'format':<10}{'shape':<18}{'bytes':>16}  relative error"
    for group in groups:
        first, errors = group.rows[0], group.errors
        error = "unknown" if errors is None else f"{errors[1]:.4f}"
        if errors is not None and f"{errors[0]:.4f}" != error:
            error = f"{errors[0]:.4f} to {error}"
        shape = "x".join(map(str, first.shape))
        yield (
            f"  {group.name:<{width}}{len(group.rows):>7}  {first.format:<10}{shape:<18}{group.nbytes:>16,}  {error}"
            f"{'  on disk' if first.where == 'disk' else ''}"
        )


def format_of(tensor: torch.Tensor) -> str | None:
    """Give the short name of the class that a weight is packed in; None for plain values."""
    kind = tensor.inner_class if isinstance(tensor, OffloadedTensor) else type(tensor)
    if isinstance(tensor, TransposedTensor):
        return format_of(tensor.inner)
    return _short_name(kind)


def _dtype_name(dtype: torch.dtype) -> str:
    """Give the name of a dtype in tract, of one that tract has not its name in torch."""
    torch_name = str(dtype).removeprefix("torch.")
    return next((known.name for known in DTYPES.values() if known.torch == torch_name), torch_name)


def _short_name(kind: Any) -> str | None:  # noqa: ANN401 - a class, or None
    if isinstance(kind, type) and issubclass(kind, SupportsOffloadState):
        tag = getattr(kind, "OFFLOAD_STATE_TAG", None)
        return Tag.parse(tag).short if tag else kind.__name__
    return None


def coverage_of(
    model: nn.Module, plan: Mapping[str, Choice] | None = None, errors: Mapping[str, float] | None = None
) -> CoverageReport:
    """Look at every weight of `model`.

    `plan` gives the reasons, `errors` the relative errors by name; None takes those of the model's own quantizer.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if plan is None:
        plan = getattr(quantizer, "plan", None) or {}
    if errors is None:
        errors = getattr(quantizer, "relative_errors", None) or {}
    return CoverageReport(tuple(_rows(model, plan, errors)))


def _rows(model: nn.Module, plan: Mapping[str, Choice], errors: Mapping[str, float]) -> Iterator[WeightRow]:
    canonical = tied_names(model)
    owners = dict(model.named_modules())
    error_of = {canonical.get(name, name): error for name, error in errors.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if canonical.get(name) != name:
            continue
        choice = plan.get(name, Choice())
        kind = format_of(parameter)
        if kind is not None and choice.format is not None and isinstance(parameter, OffloadedTensor):
            kind = _short_name(choice.format)  # the class that was stored may be a wrapper around it
        on_disk = isinstance(parameter, OffloadedTensor)
        yield WeightRow(
            name=name,
            module=type(owners[name.rpartition(".")[0]]).__name__,
            shape=tuple(parameter.shape),
            format=kind or _dtype_name(parameter.dtype),
            nbytes=parameter.nbytes_loaded if isinstance(parameter, OffloadedTensor) else held_nbytes(parameter),
            where="disk" if on_disk else "memory",
            quantized=kind is not None,
            reason="" if kind is not None else choice.reason,
            by_user=choice.by_user,
            relative_error=None if kind is None else error_of.get(name),
        )
