"""What the loading benchmark measures, part by part. Each gives a plain dictionary that becomes JSON."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loading_side import SCRIPTS, Side, in_turn, middle
from benchmarks.process import json_of, run

from t2n_hf.contract import COMPUTE_MODES

Results = dict[str, Any]
PACKED = {"weights": "q4_0", "embeddings": "q4_0", "lm_head": "q4_0"}
PLAIN = {"weights": "none"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured, and how much of it. `side` starts a worker for a specification."""

    models: dict[str, Path]
    big: str
    out: Path
    runs: int
    tokens: dict[str, int]
    run_tokens: int
    lengths: Sequence[int]
    side: Callable[[dict[str, Any]], Side]
    quanto: Callable[[dict[str, Any]], Side] | None
    quantize: Callable[[Path, Path], float]
    script: Callable[..., Results]
    share: float = 0.25
    pool_arguments: Sequence[str] = ()

    @property
    def folder(self) -> str:
        """The model that the parts about memory are about."""
        return str(self.models[self.big])

    @property
    def model_bytes(self) -> int:
        """Bytes of its bf16 weights."""
        return weight_bytes(self.models[self.big])

    @property
    def limit(self) -> int:
        """The share of that which may be in memory."""
        return int(self.share * self.model_bytes)

    def all(self, specs: dict[str, dict[str, Any]], stack: ExitStack) -> dict[str, Side]:
        """Start a side for each specification; all of them end with `stack`."""
        return {name: stack.enter_context(self.side(spec)) for name, spec in specs.items()}


def weight_bytes(folder: Path) -> int:
    """Bytes of all safetensors files of a checkpoint, headers included (a few kB)."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _resident_specs(folder: Path) -> dict[str, dict[str, Any]]:
    """Dense bf16, and every way to compute with packed weights that may round."""
    modes = [mode for mode in COMPUTE_MODES if mode != "exact"]
    packed = {mode: {"kind": "ours", "folder": str(folder), "config": {**PACKED, "compute": mode}} for mode in modes}
    return {"dense": {"kind": "dense", "folder": str(folder)}, **packed}


def decode(setting: Setting) -> Results:
    """Single-token steps of resident models, and what a packed one holds in memory afterwards."""
    results: Results = {}
    for name, folder in setting.models.items():
        with ExitStack() as stack:
            sides = setting.all(_resident_specs(folder), stack)
            in_turn(sides, 1, "decode", tokens=2)
            answers = in_turn(sides, setting.runs, "decode", tokens=setting.tokens[name])
            results[name] = {side: middle(rows, "tokens_per_s") for side, rows in answers.items()}
            for side, one in sides.items():
                results[name][side]["packed_bytes"] = one.ask("packed")["bytes"] if side != "dense" else None
                results[name][side]["footprint"] = one.loaded["footprint"]
                results[name][side]["rss"] = one.ask("memory")["rss"]
    return results


def prefill(setting: Setting) -> Results:
    """One forward over a whole prompt."""
    results: Results = {}
    for name, folder in setting.models.items():
        with ExitStack() as stack:
            sides = setting.all(_resident_specs(folder), stack)
            for length in setting.lengths:
                in_turn(sides, 1, "prefill", length=length)
                answers = in_turn(sides, setting.runs, "prefill", length=length)
                found = {side: middle(rows, "tokens_per_s") for side, rows in answers.items()}
                results.setdefault(name, {})[str(length)] = found
    return results


def _offload_specs(setting: Setting) -> dict[str, dict[str, Any]]:
    common = {"folder": setting.folder, "max_memory": setting.limit}
    spill = {"spill_dir": str(setting.out)}
    packed, fast = {"kind": "ours", **common}, {**PACKED, "compute": "fast", **spill}
    plain = {**PLAIN, **spill}
    return {
        "accelerate": {"kind": "accelerate", **common, "offload_folder": str(setting.out / "offload-accelerate")},
        "bf16": {**packed, "config": plain},
        "bf16, no readahead": {**packed, "config": {**plain, "readahead_bytes": 0}},
        "q4_0": {**packed, "config": fast},
        "q4_0, no readahead": {**packed, "config": {**fast, "readahead_bytes": 0}},
    }


def offload(setting: Setting) -> Results:
    """generate() under one limit of memory: files in the page cache, dropped before each run, before each token."""
    results: Results = {"limit": setting.limit}
    with ExitStack() as stack:
        sides = setting.all(_offload_specs(setting), stack)
        first = in_turn(sides, 1, "generate", tokens=setting.run_tokens)  # the order of use is learned in this one
        results["same tokens"] = first["bf16"][0]["ids"] == first["accelerate"][0]["ids"]
        for name, cold in (("warm", "no"), ("cold", "run"), ("cold, each token", "each")):
            answers = in_turn(sides, setting.runs, "generate", tokens=setting.run_tokens, cold=cold)
            fields = ("tokens_per_s", "cpu_per_token", "asked_per_token", "disk_per_token")
            results[name] = {side: middle(rows, *fields) for side, rows in answers.items()}
        results["memory"] = {name: side.ask("memory") for name, side in sides.items()}
    return results


def dispatch(setting: Setting) -> Results:
    """accelerate's other way, once: load_checkpoint_and_dispatch, which writes a file for each weight."""
    folder = setting.out / "offload-dispatch"
    spec = {"kind": "accelerate_dispatch", "folder": setting.folder, "max_memory": setting.limit}
    with setting.side({**spec, "offload_folder": str(folder)}) as side:
        side.ask("generate", tokens=2)
        found = {**side.ask("generate", tokens=setting.run_tokens), **side.ask("memory")}
    shutil.rmtree(folder, ignore_errors=True)
    return {name: found[name] for name in ("tokens_per_s", "peak")}


def load(setting: Setting) -> Results:
    """From nothing to a model in memory, and to its first token: quantized on the way, or before."""
    packed = setting.out / "packed"
    fast = {**PACKED, "compute": "fast"}
    spec = {"kind": "ours", "folder": setting.folder, "config": fast}
    shutil.rmtree(packed, ignore_errors=True)
    setting.quantize(setting.models[setting.big], packed)
    starts: dict[str, Callable[[], Side]] = {
        "on the fly": lambda: setting.side(spec),
        "checkpoint": lambda: setting.side({**spec, "folder": str(packed)}),
    }
    if (quanto := setting.quanto) is not None:
        starts["quanto"] = lambda: quanto({"kind": "quanto", "folder": setting.folder})
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in starts}
    for _ in range(setting.runs):
        for name, start in starts.items():
            with start() as side:
                first = side.ask("generate", tokens=1)
                after = side.ask("memory")
                row = {"load_s": side.loaded["load_s"], "peak": side.loaded["peak"], "peak_first": after["peak"]}
                answers[name].append({**row, "first_s": row["load_s"] + 1 / first["tokens_per_s"]})
                if name == "on the fly":
                    packed_bytes = side.ask("packed")["bytes"]
    shutil.rmtree(packed)
    found = {name: middle(rows, "load_s", "first_s", "peak", "peak_first") for name, rows in answers.items()}
    return {**found, "packed_bytes": packed_bytes}


def quantize(folder: Path, out: Path) -> float:
    """Run `t2n-hf quantize` and give its peak of memory, the interpreter included."""
    program = str(Path(sys.executable).with_name("t2n-hf"))
    flags = ["--weights", "q4_0", "--embeddings", "q4_0", "--lm-head", "q4_0"]
    return run([program, "quantize", str(folder), str(out), *flags]).peak_rss_bytes


def script(name: str, *arguments: str) -> Results:
    """Run one of the modules beside this one in a process of its own, on one thread."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SCRIPTS / "benchmarks" / f"{name}.py"), *arguments]
    return json_of(command, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def pool(setting: Setting) -> Results:
    """The pool by itself, and the bytes that a model reads for each token when half of it may stay."""
    found = setting.script("loading_pool", *setting.pool_arguments)
    half = setting.model_bytes // 2
    for name, ahead in (("model", {}), ("model, no readahead", {"readahead_bytes": 0})):
        config = {**PLAIN, "max_resident_bytes": half, **ahead}
        spec = {"kind": "ours", "folder": setting.folder, "config": config, "device_map": {"": "disk"}}
        with setting.side(spec) as side:
            side.ask("generate", tokens=2)
            found[name] = side.ask("generate", tokens=setting.run_tokens)["asked_per_token"] / setting.model_bytes
    return found


def export(setting: Setting) -> Results:
    """The export to Q4_0 under the limit."""
    out = setting.out / "export"
    found = setting.script("loading_export", setting.folder, str(out), "--limit", str(setting.limit))
    shutil.rmtree(out)
    return {**found, "limit": setting.limit}


def plots(setting: Setting) -> Results:
    """Memory over time, from before loading to the last token."""
    results: Results = {"limit": setting.limit}
    specs = _offload_specs(setting)
    for name in ("q4_0", "bf16"):
        with setting.side({**specs[name], "trace": True}) as side:
            side.ask("generate", tokens=setting.run_tokens)
            results[name] = side.ask("trace")["samples"]
    return results


def seven_b(setting: Setting, folder: Path) -> Results:
    """Quantize a random 7 B model and generate with it. Peaks are whole processes, the interpreter included."""
    subprocess.run([sys.executable, str(SCRIPTS / "random_llama.py"), "7b", str(folder)], check=True)
    packed = folder.with_name(f"{folder.name}-packed")
    found: Results = {"model_bytes": weight_bytes(folder), "quantize_peak": setting.quantize(folder, packed)}
    shutil.rmtree(folder)
    found["packed_bytes"] = weight_bytes(packed)
    with setting.side({"kind": "ours", "folder": str(packed), "config": {**PACKED, "compute": "fast"}}) as side:
        side.ask("generate", tokens=10)
        after = side.ask("memory")
        found["generate_peak"] = after["peak"] + after["interpreter"]
    shutil.rmtree(packed)
    return found
