"""What quantizing a checkpoint did, or would do: bytes before and after, errors, what stays float and why."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from t2n_hf.contract import Tag
from t2n_hf.dtypes import dtype_of
from t2n_hf.hf.quantize_plan import OutputPlan
from t2n_hf.hf.report import CoverageReport, WeightRow

__all__ = ["QuantizeReport", "rows_of"]


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """The weights that were written to `out` (or would be: `dry_run`), tied ones once.

    `bytes_before` are those of the stored tensors that are used, `before` by their dtype; `bytes_after` those of the
    files with weights. `errors` maps each quantized weight to ||w - q|| / ||w||, measured on some of its rows (of fused
    experts: on the first one); a class that keeps no rows apart has none. `bytes_resumed` were there from a run that
    was interrupted. `disk_needed` and `disk_free` are for `dry_run`; `largest_read` are the most bytes of stored values
    that are in memory at once.
    """

    source: str
    out: str
    coverage: CoverageReport
    before: Mapping[str, int]
    bytes_after: int
    files: tuple[str, ...]
    errors: Mapping[str, float] = field(default_factory=dict)
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

    def errors_by_format(self) -> dict[str, tuple[float, float, str]]:
        """Map each format to the mean and the largest of its weights' errors, and the name of that weight."""
        found: dict[str, list[tuple[float, str]]] = {}
        for row in self.coverage.rows:
            if row.name in self.errors:
                found.setdefault(row.format, []).append((self.errors[row.name], row.name))
        return {name: (sum(e for e, _ in pairs) / len(pairs), *max(pairs)) for name, pairs in found.items()}

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
        share = self.bytes_after / max(1, self.bytes_before)
        yield f"after  {self.bytes_after:,} bytes ({share:.0%}) in {len(self.files)} file{'s'[: len(self.files) != 1]}"
        errors = self.errors_by_format()
        for name, (count, nbytes) in self.coverage.by_format().items():
            error = f", relative error {errors[name][0]:.3f}, at most {errors[name][1]:.3f}" if name in errors else ""
            yield f"  {name:<6} {count:>5} weights {nbytes:>16,} bytes{error}"
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


def rows_of(plan: OutputPlan) -> CoverageReport:
    """Describe every weight of a plan; `nbytes` are those on disk."""
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
            )
        )
    return CoverageReport(tuple(rows))
