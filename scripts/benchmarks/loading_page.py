"""The text around the loading benchmark's table: what was measured, how, and against what."""

from benchmarks.loading_rows import lines_of
from benchmarks.table import machine

TEXT = """\
## Loading and running

Written by `scripts/bench_loading.py`. Machine: {machine}; every side computes on one thread (reading ahead has one
more). Medians of {runs} runs, the sides of a row asked in turn in the same minutes, each in a process of its own.
{versions}, optimum-quanto 0.2.7 (in an environment of its own, the same torch).

Models: a random Llama of 1.1 B in bf16, five shards (the one that is meant where none is named), and
SmolLM2-135M-Instruct in bf16. Q4_0: every matrix, the embeddings and the head; `fast` and `compiled` are values of
T2NConfig's `compute`. Dense bf16 is plain transformers, its weights copied to memory of their own.

The limit is 25 % of the model's bf16 bytes for all sides, as `device_map="auto", max_memory={{"cpu": limit}}`. The side
of accelerate is plain transformers with these arguments and an `offload_folder`, and reads the checkpoint's files.
Offloaded speeds are of `generate()`, a prompt of 8 tokens included. Cold: the pages of all files involved are dropped
with posix_fadvise; the page cache is not limited otherwise.

Memory is the kernel's count of resident pages, anonymous and mapped from files, over that of the interpreter with its
libraries after they loaded and ran a tiny model of the same kind; peaks are its high-water mark. No cgroup was used.

{count} comparisons, {missed} of their goals missed.

| what | ours | compared with | ratio | to reach |
|---|---:|---:|---:|---|
{table}
"""


def section(results: dict) -> list[str]:
    """The lines of the page's section."""
    lines = lines_of(results)
    text = TEXT.format(
        machine=machine(),
        runs=results["runs"],
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        count=len(lines),
        missed=sum(line.missed for line in lines),
        table="\n".join(line.text() for line in lines),
    ).splitlines()
    if "offload" in results:
        same = "the same tokens as" if results["offload"]["same tokens"] else "other tokens than"
        text += ["", f"The offloaded bf16 model generates {same} accelerate's."]
    if "plots" in results:
        text += ["", *(f"![Memory over time, {name} offloaded](memory-{name}.png)" for name in ("q4_0", "bf16"))]
    return text
