"""What became of each weight: its format, its bytes, where it lives, and why it stayed float."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from t2n_hf.contract import SupportsOffloadState, Tag
from t2n_hf.dtypes import dtype_of
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.weights import held_nbytes, tied_names
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["CoverageReport", "WeightRow", "coverage_of", "format_of"]


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """One weight.

    `format` is the short name of its class, or its dtype in tract ("f32"); `nbytes` what it takes in memory when it is
    read; `where` is "memory" or "disk"; `reason` says why it is not quantized; `by_user` that an option or its nature
    (a vector) is the reason.
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
        if self.dense:
            lines.append("stayed float:")
            lines += [f"  {name}: {reason or 'no reason recorded'}" for name, reason in self.dense.items()]
        return "\n".join(lines)


def format_of(tensor: torch.Tensor) -> str | None:
    """Give the short name of the class that a weight is packed in; None for plain values."""
    kind = tensor.inner_class if isinstance(tensor, OffloadedTensor) else type(tensor)
    if isinstance(tensor, TransposedTensor):
        return format_of(tensor.inner)
    return _short_name(kind)


def _short_name(kind: Any) -> str | None:  # noqa: ANN401 - a class, or None
    if isinstance(kind, type) and issubclass(kind, SupportsOffloadState):
        tag = getattr(kind, "OFFLOAD_STATE_TAG", None)
        return Tag.parse(tag).short if tag else kind.__name__
    return None


def coverage_of(model: nn.Module, plan: Mapping[str, Choice] | None = None) -> CoverageReport:
    """Look at every weight of `model`. `plan` gives the reasons; None takes those of the model's own quantizer."""
    if plan is None:
        plan = getattr(getattr(model, "hf_quantizer", None), "plan", None) or {}
    return CoverageReport(tuple(_rows(model, plan)))


def _rows(model: nn.Module, plan: Mapping[str, Choice]) -> Iterator[WeightRow]:
    canonical = tied_names(model)
    owners = dict(model.named_modules())
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
            format=kind or dtype_of(parameter.dtype).name,
            nbytes=parameter.nbytes_loaded if isinstance(parameter, OffloadedTensor) else held_nbytes(parameter),
            where="disk" if on_disk else "memory",
            quantized=kind is not None,
            reason="" if kind is not None else choice.reason,
            by_user=choice.by_user,
        )
