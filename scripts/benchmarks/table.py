"""Write the figures of a benchmark run as a page that can be read."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One comparison: ours, the other side (or the limit), the unit, and what was to be reached."""

    what: str
    ours: float
    theirs: float
    unit: str
    target: str


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_page(page: Path, rows: list[Row], results: dict) -> None:
    """Write the table, with the machine, versions and number of runs, to `page`."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Benchmarks",
        "",
        "Written by `scripts/bench_export.py`; ratios are of medians, the sides of a row in turn. Parts of the",
        "table may have been measured one after the other; KL, distances and agreement are single runs.",
        "",
        f"Machine: {_cpu()}, {os.cpu_count()} cores. Medians of {results['runs']} runs. {versions}.",
        "Compared with torch_to_nnef_llm 0.24.12 (transformers 5.14.1), its check switched off, on the same checkpoint",
        "(SmolLM2-135M-Instruct), whole process against whole process. Export uses the threads that each tool takes by",
        "default; tract and the PyTorch decode run on one thread. CPU figures are CPU seconds of the process.",
        "",
        "| what | ours | compared with | ratio | to reach |",
        "|---|---:|---:|---:|---|",
    ]
    for row in rows:
        ratio = f"{row.ours / row.theirs:.3g}" if row.theirs else ""
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            f"| {row.what} | {_number(row.ours)}{unit} | {_number(row.theirs)}{unit} | {ratio} | {row.target} |"
        )
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(lines) + "\n")
