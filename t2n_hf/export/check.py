"""Hold an archive, as tract runs it, against what PyTorch said."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import CheckError
from t2n_hf.export.reference import InputSpec, Step
from t2n_hf.export.report import format_bytes
from t2n_hf.tract.runner import TractRunner

__all__ = ["TOLERANCES", "CheckResult", "Comparison", "available_bytes", "check_archive", "timeout_of", "why_skipped"]

# Largest error relative to the largest value of an output, by dtype of the archive; PyTorch computes in f32. f32
# differs by the order of additions, f16 also by the rounding of weights, activations and caches.
TOLERANCES: Final = {"f32": 1e-4, "f16": 2e-2}
_LOAD_FACTOR: Final = 2.5
_INTERPRETER_NBYTES: Final = 300_000_000
# tract has been seen to load for ever; a call that is just slow takes its time by the bytes of the weights.
_TIMEOUT_S: Final = 600.0
_TIMEOUT_BYTES_PER_S: Final = 1e7
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Largest errors over all outputs of all steps, and what they were held against."""

    max_abs_error: float
    max_rel_error: float
    tolerance: float
    steps: int


def available_bytes() -> int | None:
    """Memory that can still be taken without swapping, within the limit of the control group; None when unknown."""
    known = [n for n in (_meminfo_available(), _cgroup_available()) if n is not None]
    return min(known, default=None)


def _meminfo_available() -> int | None:
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not (limit.exists() and used.exists()):
        return None
    text = limit.read_text().strip()
    return None if text == "max" else max(0, int(text) - int(used.read_text()))


def why_skipped(weight_bytes: int, largest_dense_bytes: int, available: int | None) -> str | None:
    """Say why the check cannot be run in `available` bytes of memory; None when it can.

    `weight_bytes` is what tract will load, `largest_dense_bytes` the largest weight of the reference in f32.
    """
    if available is None:
        return None
    in_tract = int(weight_bytes * _LOAD_FACTOR) + _INTERPRETER_NBYTES
    needed = max(in_tract, 3 * largest_dense_bytes + _INTERPRETER_NBYTES)
    if needed <= available:
        return None
    return f"short of memory: it needs about {format_bytes(needed)}, {format_bytes(available)} are available"


def check_archive(
    archive: Path,
    specs: Sequence[InputSpec],
    steps: Iterable[Step],
    *,
    dtype: str,
    tolerance: float | None = None,
    weight_bytes: int = 0,
    tract_folder: Path | None = None,
) -> CheckResult:
    """Run `steps` in tract, each fed with tract's own outputs of the step before, and compare.

    `weight_bytes` is the size of the weights: a call of tract may take ten minutes, and longer for large ones.
    `tract_folder` holds a package of tract in place of the installed one.

    Raises CheckError naming output, step and place of the first value beyond the tolerance, TractError when tract
    fails.
    """
    comparison = Comparison(TOLERANCES[dtype] if tolerance is None else tolerance)
    dtypes = {spec.name: np.dtype(dtype_named(spec.dtype).numpy) for spec in specs}
    with TractRunner(archive, timeout_s=timeout_of(weight_bytes), tract_folder=tract_folder) as runner:
        before: Mapping[str, np.ndarray] = {}
        for number, step in enumerate(steps):
            given = {name: value.astype(dtypes[name]) for name, value in step.inputs.items()}
            fed = {name: before[source] for name, source in step.fed_back.items()}
            before = runner.run({**given, **fed})
            comparison.add(f"step {number} ({step})", before, step.outputs, step.ignored)
    return comparison.result()


def timeout_of(weight_bytes: int) -> float:
    """Longest time, in seconds, that one call of tract may take with weights of that size."""
    return _TIMEOUT_S + weight_bytes / _TIMEOUT_BYTES_PER_S


class Comparison:
    """Largest differences between what tract and PyTorch give; one beyond the tolerance raises CheckError."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._abs = self._rel = 0.0
        self._steps = 0

    def add(
        self,
        where: str,
        got: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
        ignored: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Compare outputs by name; `where` says which call they are of. Raises CheckError.

        `ignored` is true, for an output by name, where its values mean nothing; it is broadcast against the output.
        """
        self._steps += 1
        for name, value in expected.items():
            if name not in got:
                raise CheckError(f"{where}: tract gives no output {name!r}; it gives {', '.join(got)}")
            nothing = (ignored or {}).get(name)
            if nothing is not None and got[name].shape == value.shape:
                value = np.where(nothing, got[name], value)
            self._compare(f"output {name!r} of {where}", got[name], value)

    def _compare(self, what: str, got: np.ndarray, expected: np.ndarray) -> None:
        if got.shape != expected.shape:
            raise CheckError(f"{what} has shape {list(got.shape)} in tract, {list(expected.shape)} in PyTorch; {_NEXT}")
        if got.size == 0:
            return
        error = _differences(got, expected)
        finite = np.abs(expected[np.isfinite(expected)], dtype=np.float64)
        scale = max(float(finite.max()) if finite.size else 0.0, float(np.finfo(np.float32).tiny))
        worst = int(error.argmax())
        largest = float(error.flat[worst])
        self._abs, self._rel = max(self._abs, largest), max(self._rel, largest / scale)
        if not largest <= self._tolerance * scale:
            place = [int(i) for i in np.unravel_index(worst, error.shape)]
            raise CheckError(
                f"{what} differs at {place}: tract gives {got.flat[worst]:.6g}, PyTorch {expected.flat[worst]:.6g}; "
                f"the difference {largest:.3g} is {largest / scale:.3g} of the largest value {scale:.4g}, "
                f"tolerance {self._tolerance:g}; {_NEXT}"
            )

    def result(self) -> CheckResult:
        """Largest differences so far."""
        return CheckResult(
            max_abs_error=self._abs, max_rel_error=self._rel, tolerance=self._tolerance, steps=self._steps
        )


_NEXT: Final = "nothing was exported. Try capture='whole', or export with check=False to look at the archive"


def _differences(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Absolute differences in f64: 0 where both hold the same infinity or NaN, infinity where only one does."""
    left, right = got.astype(np.float64), expected.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(left - right))
    return np.where(np.isnan(error), np.inf, error)
