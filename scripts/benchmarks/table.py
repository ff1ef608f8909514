"""Write the figures of a benchmark run into the page that can be read, each benchmark its own section."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TITLE = "# Benchmarks"


@dataclass(frozen=True)
class Goal:
    """What the ratio is to be: ">=" or "<=" a number."""

    sign: str
    number: float

    def reached(self, ratio: float) -> bool:
        return ratio >= self.number if self.sign == ">=" else ratio <= self.number


@dataclass(frozen=True)
class Row:
    """One comparison: ours, the other side (or the limit), the unit, and what was to be reached, in words.

    It is missed when the ratio of ours to the other does not reach `goal`, or ours is more than `most`.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    target: str
    goal: Goal | None = None
    most: float = float("inf")

    @property
    def missed(self) -> bool:
        return self.ours > self.most or (self.goal is not None and not self.goal.reached(self.ours / self.theirs))

    def text(self) -> str:
        """The line as Markdown; a missed goal is said to be missed."""
        ratio = f"{self.ours / self.theirs:.3g}" if self.theirs else ""
        unit = f" {self.unit}" if self.unit else ""
        missed = ": **missed**" if self.missed else ""
        both = f"{_number(self.ours)}{unit} | {_number(self.theirs)}{unit}"
        return f"| {self.what} | {both} | {ratio} | {self.target}{missed} |"


@dataclass(frozen=True)
class Line:
    """One comparison whose goal is for the ratio of ours to the other; other = 0 when there is none."""

    what: str
    ours: float
    other: float
    unit: str
    goal: Goal | None = None

    @property
    def missed(self) -> bool:
        return self.goal is not None and not self.goal.reached(self.ours / self.other)

    def text(self) -> str:
        """The line as Markdown; a missed goal is said to be missed."""
        unit = f" {self.unit}" if self.unit else ""
        other, ratio = (f"{_number(self.other)}{unit}", f"{self.ours / self.other:.4g}") if self.other else ("", "")
        goal = "" if self.goal is None else f"{self.goal.sign} {self.goal.number:g}x"
        missed = ": **missed**" if self.missed else ""
        return f"| {self.what} | {_number(self.ours)}{unit} | {other} | {ratio} | {goal}{missed} |"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    """The processor's name and the number of its cores."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} cores"


def write_section(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put `lines` between the markers of section `name`; add the section at the end when the page has none."""
    begin, end = f"<!-- {name}: written by a script -->", f"<!-- {name}: end -->"
    text = page.read_text() if page.exists() else f"{TITLE}\n"
    section = "\n".join([begin, *lines, end])
    before, found, rest = text.partition(begin)
    if found:
        _, _, after = rest.partition(end)
        text = before + section + after
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)


def _runs(by_part: dict[str, int]) -> str:
    """How often each part was run: "2 runs (depth, size), 5 runs (export)"."""
    counts = sorted(set(by_part.values()))
    return ", ".join(
        f"{count} runs ({', '.join(part for part, runs in by_part.items() if runs == count)})" for count in counts
    )


def write_page(page: Path, rows: list[Row], results: dict) -> None:
    """Write the export benchmark's table, with the machine, versions and number of runs, to `page`."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "## Export",
        "",
        "Written by `scripts/bench_export.py`; ratios are of medians, the sides of a row in turn. Parts of the",
        "table may have been measured one after the other; KL, distances and agreement are single runs.",
        "",
        f"Machine: {machine()}. Medians of {_runs(results['runs'])}. {versions}.",
        "Compared with torch_to_nnef_llm 0.24.12 (transformers 5.14.1), its check switched off, on the same checkpoint",
        "(SmolLM2-135M-Instruct), whole process against whole process. Export uses the threads that each tool takes by",
        "default; tract and the PyTorch decode run on one thread. CPU figures are CPU seconds of the process.",
        "",
        "| what | ours | compared with | ratio | to reach |",
        "|---|---:|---:|---:|---|",
    ]
    lines += [row.text() for row in rows]
    write_section(page, "export", lines)
