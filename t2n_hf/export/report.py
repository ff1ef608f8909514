"""What an export did: sizes, errors against PyTorch, time and memory."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["ExportReport", "Stopwatch", "format_bytes", "peak_rss_bytes"]

_SHOWN: Final = 12
_STATUS: Final = Path("/proc/self/status")


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes the way people read it: "76.3 MB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    # Where Linux counts per program image, a parent's peak is not inherited; getrusage carries it across exec.
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """Seconds by phase; a phase that comes again adds up."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside, under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Phases in the order in which they began, and "total" since the watch was made."""
        return {**self._phases, "total": time.perf_counter() - self._start_s}


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `export_nnef` returns.

    Attributes:
        folder: the export folder.
        archive: the archive inside it, which tract loads; of a model that is several graphs, the last one's.
        archives: name of each graph ("model" when it is one) -> its archive.
        dtype: numbers of the archive, "f32" or "f16".
        check: "passed", or "skipped: <why>".
        max_abs_error: largest difference from PyTorch over all checked outputs; None when not checked.
        max_rel_error: the same, relative to the largest value of the output it is in.
        tolerance: what `max_rel_error` was held against; None when not checked.
        seconds: by phase, and "total".
        peak_rss_bytes: largest resident set of the process that exported.
        weight_bytes: payload of all `.dat` files, headers included.
        formats: weights by format: how many, and their bytes.
        dense: weight name -> why it is dense although it is, or was to be, quantized.
        fixed_shapes: whether the archive runs at the lengths of the example alone, because torch.export refuses the
            model, or because that was asked for.
        reads: what the model asked of the values of its inputs while it was captured, and was told: the archive holds
            for inputs that answer the same.
    """

    folder: Path
    archive: Path
    archives: Mapping[str, Path]
    dtype: str
    check: str
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    tolerance: float | None = None
    seconds: Mapping[str, float]
    peak_rss_bytes: int
    weight_bytes: int
    formats: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    dense: Mapping[str, str] = field(default_factory=dict)
    fixed_shapes: bool = False
    reads: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            **asdict(self),
            "folder": str(self.folder),
            "archive": str(self.archive),
            "archives": {name: str(path) for name, path in self.archives.items()},
        }

    def __str__(self) -> str:
        """Several lines for people."""
        lines = [
            *(f"archive   {path}" for path in self.archives.values()),
            f"weights   {format_bytes(self.weight_bytes)}: "
            + ", ".join(f"{count} {name} ({format_bytes(size)})" for name, (count, size) in self.formats.items()),
            f"check     {self._check_line()}",
            f"time      {self.seconds['total']:.1f} s: "
            + ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items() if name != "total"),
            f"memory    {format_bytes(self.peak_rss_bytes)} at its peak",
        ]
        if self.fixed_shapes:
            lines.append("lengths   fixed at those of the example: there is no capture of this model with free ones")
        if self.reads:
            lines += ["holds for inputs that answer the same", *(f"  {read}" for read in self.reads)]
        return "\n".join([*lines, *self._dense_lines()])

    def _check_line(self) -> str:
        if self.max_abs_error is None or self.max_rel_error is None or self.tolerance is None:
            return self.check
        return (
            f"{self.check}: largest error {self.max_abs_error:.2g}, "
            f"relative {self.max_rel_error:.2g} (tolerance {self.tolerance:.2g})"
        )

    def _dense_lines(self) -> list[str]:
        if not self.dense:
            return []
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.dense.items():
            by_reason.setdefault(reason, []).append(name)
        lines = ["dense"]
        for reason, names in by_reason.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {reason}: {', '.join(names[:_SHOWN])}{more}")
        return lines
