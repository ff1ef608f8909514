"""What quantizing a checkpoint did, or would do: bytes before and after, errors, what stays float and why."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from t2n_hf.contract import Tag
from t2n_hf.dtypes import dtype_of
from t2n_hf.hf.quantize.plan import OutputPlan
from t2n_hf.hf.report import CoverageReport, WeightRow

__all__ = ["QuantizeReport", "rows_of", "stored_nbytes"]


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """The weights that were written to `out` (or would be: `dry_run`), tied ones once.

    `bytes_before` are those of the stored tensors that are used, `before` by their dtype; `bytes_after` those of the
    files with weights, `stored` those that each weight is made of. `bytes_resumed` were there from a run that was
    interrupted. `disk_needed` and `disk_free` are for `dry_run`; `largest_read` are the most bytes of stored values
    that are in memory at once.
    """

    source: str
    out: str
    coverage: CoverageReport
    before: Mapping[str, int]
    bytes_after: int
    files: tuple[str, ...]
    stored: Mapping[str, int]
    seconds: float = 0.0
    bytes_resumed: int = 0
    dry_run: bool = False
    disk_needed: int = 0
    disk_free: int = 0
    largest_read: int = 0

    @property
    def bytes_before(self) -> int:
        """Bytes of the stored tensors that are used."""
        return sum(self.before.values())

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of each quantized weight (see WeightRow) whose class allows to measure it."""
        rows = self.coverage.rows
        return {row.name: row.relative_error for row in rows if row.relative_error is not None}

    def to_dict(self) -> dict[str, Any]:
        """Give everything as JSON can hold it."""
        kept = {name: value for name, value in vars(self).items() if name != "coverage"}
        rows = [{**vars(row), "shape": list(row.shape)} for row in self.coverage.rows]
        return {**kept, "bytes_before": self.bytes_before, "files": list(self.files), "weights": rows}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verb = "would be quantized to" if self.dry_run else "quantized to"
        yield f"{self.source} {verb} {self.out}"
        stored = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.before.items())
        yield f"before {self.bytes_before:,} bytes ({stored})"
        share, plural = self.bytes_after / max(1, self.bytes_before), "" if len(self.files) == 1 else "s"
        yield f"after  {self.bytes_after:,} bytes ({share:.0%}) in {len(self.files)} file{plural}"
        for name, (count, nbytes) in self.coverage.by_format().items():
            rows = [row for row in self.coverage.rows if row.format == name]
            read = sum(self.stored.get(row.name, 0) for row in rows)
            line = f"  {name:<8} {count:>5} weights {read:>16,} -> {nbytes:>15,} bytes"
            errors = [row.relative_error for row in rows if row.relative_error is not None]
            mean = sum(errors) / len(errors) if errors else 0.0
            yield f"{line}, relative error {mean:.3f}, at most {max(errors):.3f}" if errors else line
        for reason, (count, nbytes, example) in self._dense().items():
            yield f"  stays float: {count} x {reason} ({nbytes:,} bytes, e.g. {example})"
        if self.dry_run:
            yield f"disk: {self.disk_needed:,} bytes needed, {self.disk_free:,} free"
            yield f"memory: {self.largest_read:,} bytes of stored values at once, and what they become"
            return
        resumed = f", {self.bytes_resumed:,} bytes were there already" if self.bytes_resumed else ""
        yield f"{self.seconds:.1f} s{resumed}"

    def _dense(self) -> dict[str, tuple[int, int, str]]:
        counts, sizes = Counter[str](), Counter[str]()
        example: dict[str, str] = {}
        for row in self.coverage.rows:
            if not row.quantized and len(row.shape) > 1:
                counts[row.reason] += 1
                sizes[row.reason] += row.nbytes
                example.setdefault(row.reason, row.name)
        return {reason: (counts[reason], nbytes, example[reason]) for reason, nbytes in sizes.most_common()}


def stored_nbytes(plan: OutputPlan) -> dict[str, int]:
    """Bytes of the stored tensors that each weight is made of; those of several weights are shared out by size."""
    found = {}
    for unit in plan.units:
        values = sum(math.prod(weight.shape) for weight in unit.weights)
        for weight in unit.weights:
            found[weight.name] = unit.nbytes * math.prod(weight.shape) // max(1, values)
    return found


def rows_of(plan: OutputPlan, errors: Mapping[str, float] | None = None) -> CoverageReport:
    """Describe every weight of a plan; `nbytes` are those on disk, `errors` relative ones by name."""
    rows = []
    for weight in plan.weights:
        kind = weight.choice.format
        rows.append(
            WeightRow(
                name=weight.name,
                module=weight.module,
                shape=weight.shape,
                format=dtype_of(weight.dtype).name if kind is None else Tag.parse(kind.OFFLOAD_STATE_TAG).short,
                nbytes=weight.nbytes,
                where="disk",
                quantized=kind is not None,
                reason=weight.choice.reason,
                by_user=weight.choice.by_user,
                relative_error=(errors or {}).get(weight.name),
            )
        )
    return CoverageReport(tuple(rows))
