"""Measure loading and running: packed against dense, offloaded against accelerate, and what memory they take.

Every ratio is of medians within this run, its sides asked in turn. A quiet machine is assumed. Results are kept as
JSON in bench-out/loading.json part by part, so that a run can be resumed (`--only`), and written into
docs/benchmarks.md with what was to be reached. `--seven-b` adds the 7 B model (18 GB of disk), `--quick` runs every
part on a tiny model within this process: its figures mean nothing.

Minutes on two quiet cores: decode 2, prefill 9, offload 8, dispatch 1, load 4, pool 1, export 2, plots 1.
"""

import argparse
import importlib
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import random_llama
from benchmarks import loading_parts as parts
from benchmarks.loading_page import section
from benchmarks.loading_rows import lines_of
from benchmarks.loading_side import InlineSide, Side
from benchmarks.table import write_section

import t2n_hf

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
OUT = ROOT / "bench-out"
BIG, SMALL = "1.1 B", "SmolLM2"
PARTS: dict[str, Callable[[parts.Setting], parts.Results]] = {
    "decode": parts.decode,
    "prefill": parts.prefill,
    "offload": parts.offload,
    "dispatch": parts.dispatch,
    "load": parts.load,
    "pool": parts.pool,
    "export": parts.export,
    "plots": parts.plots,
}


def other_python() -> str:
    """The interpreter of the environment that has optimum-quanto and matplotlib."""
    made = subprocess.run(
        [ROOT / "scripts" / "baselines" / "environment_loading"], check=True, capture_output=True, text=True
    )
    return f"{made.stdout.strip()}/bin/python"


def full_setting(out: Path, runs: int, launcher: Sequence[str]) -> parts.Setting:
    """The real models, a process for each side."""
    log = out / "loading-workers.log"
    log.unlink(missing_ok=True)
    python = other_python()
    return parts.Setting(
        models={
            BIG: random_llama.build("1.1b", CACHE / "random-llama-1.1b"),
            SMALL: CACHE / "SmolLM2-135M-Instruct-bf16",
        },
        big=BIG,
        out=out,
        runs=runs,
        tokens={BIG: 16, SMALL: 40},
        run_tokens=12,
        lengths=(128, 512),
        side=lambda spec: Side(spec, log, launcher=launcher),
        quanto=lambda spec: Side(spec, log, python),
        quantize=parts.quantize,
        script=parts.script,
    )


def quick_setting(out: Path) -> parts.Setting:
    """A tiny model, everything in this process, without what needs another environment."""

    def quantize(folder: Path, packed: Path) -> float:
        t2n_hf.quantize_checkpoint(folder, packed, **parts.PACKED)
        return 0.0

    return parts.Setting(
        models={BIG: random_llama.build("tiny", out / "random-llama-tiny")},
        big=BIG,
        out=out,
        runs=1,
        tokens={BIG: 2},
        run_tokens=2,
        lengths=(8,),
        side=InlineSide,
        quanto=None,
        quantize=quantize,
        script=lambda name, *given: importlib.import_module(f"benchmarks.{name}").measure(list(given)),
        share=0.7,
        pool_arguments=("--count", "8", "--elements", "1024", "--passes", "2", "--rounds", "1"),
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", type=Path, metavar="FOLDER", help="a tiny model, results into this folder")
    parser.add_argument("--seven-b", type=Path, metavar="FOLDER", help="measure the 7 B model too, made in this folder")
    parser.add_argument("--launcher", default="", help="goes before each side's command, e.g. systemd-run --scope ...")
    parser.add_argument("--no-page", action="store_true", help="leave docs/benchmarks.md alone")
    arguments = parser.parse_args(given)
    chosen = arguments.only.split(",") if arguments.only is not None else list(PARTS)
    if unknown := [part for part in chosen if part and part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    out = arguments.quick or OUT
    out.mkdir(parents=True, exist_ok=True)
    setting = (
        quick_setting(out) if arguments.quick else full_setting(out, arguments.runs, shlex.split(arguments.launcher))
    )
    work = {part: PARTS[part] for part in chosen if part}
    if arguments.seven_b is not None:
        work["seven_b"] = lambda setting: parts.seven_b(setting, arguments.seven_b)
    store = out / "loading.json"
    results = json.loads(store.read_text()) if store.exists() else {}
    for name, measure in work.items():
        print(f"measuring {name} ...", file=sys.stderr)
        start = time.perf_counter()
        found = measure(setting)
        results = json.loads(store.read_text()) if store.exists() else {}  # another run may have written meanwhile
        results[name] = found
        results.setdefault("seconds", {})[name] = round(time.perf_counter() - start)
        results["runs"] = setting.runs
        packages = ("t2n-hf", "torch", "transformers", "accelerate")
        results["versions"] = {"python": platform.python_version(), **{one: version(one) for one in packages}}
        store.write_text(json.dumps(results, indent=1))
    for line in lines_of(results):
        print(line.text())
    if arguments.quick:
        write_section(out / "benchmarks.md", "loading", section(results))
    elif not arguments.no_page:
        if "plots" in work:
            subprocess.run(
                [other_python(), ROOT / "scripts" / "benchmarks" / "loading_plots.py", store, ROOT / "docs"], check=True
            )
        write_section(ROOT / "docs" / "benchmarks.md", "loading", section(results))
    shutil.rmtree(out / "offload-accelerate", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
