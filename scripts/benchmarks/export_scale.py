"""How exporting grows: with depth, with size, and over the decoders of the zoo beside the other tool."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import random_llama
from benchmarks.process import json_of, median, run

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache"
SCRIPTS = ROOT / "scripts"
# The zoo of the tests is a package; the script of that name must not hide it.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(SCRIPTS)])}
KINDS = {"q4_0": ["--weights", "q4_0", "--embeddings", "q4_0"], "f16": ["--dtype", "f16"]}


def _script(name: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "benchmarks" / name)]


def depth(results: dict, runs: int) -> None:
    """Random Llamas of 16, 32 and 64 layers, without weights; and how long the command line takes to say its help."""
    results["depth"] = json_of([*_script("export_depth.py"), "--rounds", str(runs)], ONE_THREAD)
    program = str(Path(sys.executable).with_name("t2n-hf"))
    results["help_s"] = median([run([program, "--help"]) for _ in range(runs)], "wall_s")


def size(results: dict, runs: int, out: Path) -> None:
    """The random 1.1 B Llama in bf16 shards: each export in turn with cp of what it reads and of what it writes."""
    model = random_llama.build("1.1b", CACHE / "random-llama-1.1b")
    shards = sorted(model.glob("*.safetensors"))
    target, copy = out / "size", out / "size-copy"
    for kind, flags in KINDS.items():
        rows = []
        for _ in range(runs):
            shutil.rmtree(target, ignore_errors=True)
            command = [*_script("export_size.py"), str(model), str(target), *flags]
            os.sync()
            whole = run(command, ONE_THREAD)
            phases = whole.last_json()
            copied = _copy_seconds([phases["archive"]], copy) + _copy_seconds([*map(str, shards)], copy)
            rows.append((phases["seconds"], copied, whole))
        shutil.rmtree(target, ignore_errors=True)
        results[f"size {kind}"] = {
            "capture_s": statistics.median(seconds["graph"] for seconds, _, _ in rows),
            "export_s": statistics.median(seconds["total"] for seconds, _, _ in rows),
            "copy_s": statistics.median(copied for _, copied, _ in rows),
            "wall_s": median([whole for _, _, whole in rows], "wall_s"),
            "peak_rss_bytes": median([whole for _, _, whole in rows], "peak_rss_bytes"),
        }


def _copy_seconds(files: list[str], folder: Path) -> float:
    """Time cp of `files`, all of them in the system's cache, while nothing else waits to be written to the disk."""
    for file in files:
        subprocess.run(["cp", file, "/dev/null"], check=True)
    folder.mkdir()
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", *files, str(folder)], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


def zoo(results: dict, out: Path, python: str) -> None:
    """Every decoder of the zoo, saved: both tools export all of them in one process each, on one thread."""
    folder = out / "zoo-decoders"
    shutil.rmtree(folder, ignore_errors=True)
    names = json_of([*_script("export_zoo.py"), "--save", str(folder)], ONE_THREAD)
    folders = [str(folder / name) for name in names]
    baseline = str(SCRIPTS / "baselines" / "torch_to_nnef_zoo.py")
    ours = json_of([*_script("export_zoo.py"), *folders], ONE_THREAD)
    theirs = json_of([python, baseline, *folders], ONE_THREAD)
    shutil.rmtree(folder, ignore_errors=True)
    results["zoo"] = {"ours": ours, "theirs": theirs}
