"""Export SmolLM2 with t2n_hf and with torch_to_nnef_llm, in turn, compare what matters, and write docs/benchmarks.md.

Ratios are of medians within this run. A quiet machine is assumed; threads are stated in the table. Both sides of the
export get an environment of their own, as their users have it (scripts/baselines/environment_ours, environment).
`--parts` runs some of the measurements only; results are kept as JSON in bench-out/export.json and merged, so that
parts can be run one after the other.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from benchmarks import export_scale, quality
from benchmarks.export_rows import rows_of
from benchmarks.process import Run, alternate, json_of, median, run
from benchmarks.table import write_page
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from t2n_hf import T2NConfig, materialize

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
MODEL = CACHE / "SmolLM2-135M-Instruct"
BF16 = CACHE / "SmolLM2-135M-Instruct-bf16"
MINILM = CACHE / "all-MiniLM-L6-v2"
OUT = ROOT / "bench-out"
FAST_ROWS = 32
PARTS = ("export", "archive", "quality", "torch", "depth", "size", "zoo")
FORMATS = {"f32": [], "q4_0": ["--weights", "q4_0", "--embeddings", "q4_0"], "f16": ["--dtype", "f16"]}


def programs_of(script: str) -> Path:
    """The folder of programs of the environment that a script of scripts/baselines makes."""
    made = subprocess.run([str(ROOT / "scripts" / "baselines" / script)], check=True, capture_output=True, text=True)
    return Path(made.stdout.strip()) / "bin"


def export_ours(kind: str, programs: Path) -> Run:
    out = OUT / f"ours-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    return run([str(programs / "t2n-hf"), "export", str(MODEL), str(out), *FORMATS[kind], "--no-check"])


def export_theirs(kind: str, python: str) -> Run:
    out = OUT / f"theirs-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    script = str(ROOT / "scripts" / "baselines" / "torch_to_nnef_export.py")
    flags = {"f32": [], "q4_0": ["--q4_0"], "f16": ["--dtype", "f16"]}[kind]
    return run([python, script, str(MODEL), str(out), *flags])


def archive_of(side: str, kind: str) -> Path:
    return OUT / f"{side}-{kind}" / ("model.nnef.tgz" if side == "ours" else "model/model.nnef.tgz")


def graph_text(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        member = tar.extractfile("graph.nnef")
        assert member is not None
        return member.read()


def payload_bytes(archive: Path) -> int:
    """Bytes of the weights' values: the `.dat` files without their headers of 128 bytes."""
    with tarfile.open(archive) as tar:
        return sum(member.size - 128 for member in tar if member.name.endswith(".dat"))


def bench_export(results: dict, runs: int, kinds: Sequence[str]) -> None:
    mine, python = programs_of("environment_ours"), str(programs_of("environment") / "python")
    for kind in kinds:
        commands = {
            "ours": lambda kind=kind: export_ours(kind, mine),
            "theirs": lambda kind=kind: export_theirs(kind, python),
        }
        timed = alternate(commands, runs)
        results[f"export {kind}"] = {
            side: {field: median(rows, field) for field in ("wall_s", "cpu_s", "peak_rss_bytes")}
            for side, rows in timed.items()
        }
    half = export_ours("f16", mine)
    results["export f16"] = {"ours": {field: getattr(half, field) for field in ("wall_s", "cpu_s", "peak_rss_bytes")}}


def bench_archive(results: dict, runs: int) -> None:
    """Graph size, bytes written, load time and single-token steps in tract, in turn."""
    config = json.loads((MODEL / "config.json").read_text())
    heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    script = str(ROOT / "scripts" / "benchmarks" / "tract_speed.py")
    for side, kind in (("ours", "f32"), ("theirs", "f32"), ("ours", "q4_0"), ("theirs", "q4_0"), ("ours", "f16")):
        text = graph_text(archive_of(side, kind))
        size = archive_of(side, kind).stat().st_size
        results[f"graph {side} {kind}"] = {"lines": text.count(b"\n"), "bytes": len(text), "archive_bytes": size}
    results["weight_bytes"] = {kind: payload_bytes(archive_of("ours", kind)) for kind in ("f32", "q4_0")}
    speeds: dict[str, list[dict]] = {}
    for _ in range(runs):
        for side, kind in (("ours", "q4_0"), ("theirs", "q4_0"), ("ours", "f32"), ("theirs", "f32"), ("ours", "f16")):
            command = [sys.executable, script, str(archive_of(side, kind)), "--heads", str(heads)]
            command += ["--head-dim", str(head_dim), "--dtype", "f16" if kind == "f16" else "f32"]
            speeds.setdefault(f"{side} {kind}", []).append(json_of(command))
    for name, rows in speeds.items():
        middle = len(rows) // 2
        steps = {past: sorted(one["step_cpu_s"][past] for one in rows)[middle] for past in rows[0]["step_cpu_s"]}
        results[f"tract {name}"] = {
            "load_cpu_s": sorted(one["load_cpu_s"] for one in rows)[middle],
            "step_cpu_s": steps,
        }


def their_weights(source: Path, model: nn.Module, names: list[str]) -> nn.Module:
    """Put the values that the other tool's min-max Q4_0 gives into `model`."""
    out = OUT / f"theirs-{source.name}.safetensors"
    script = str(ROOT / "scripts" / "baselines" / "torch_to_nnef_quantize.py")
    subprocess.run(
        [str(programs_of("environment") / "python"), script, str(source), str(out)],
        input="\n".join(names),
        text=True,
        check=True,
    )
    model.load_state_dict(load_file(out), strict=False)
    return model


def quantized_names(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Embedding)
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)]
    return [name for name in names if name in dict(model.named_parameters())]


def bench_quality(results: dict) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    config = T2NConfig(weights="q4_0", embeddings="q4_0")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = quality.windows(tokenizer)
    source = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    their_weights(MODEL, theirs, quantized_names(theirs))
    results["kl theirs"] = quality.compare(source, theirs, texts)
    del theirs
    ours = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config, dtype=torch.float32).eval()
    results["kl ours"] = quality.compare(source, ours, texts)
    del source
    dense = materialize(AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config, dtype=torch.float32))
    results["exact tokens"] = same_tokens(ours, dense.eval(), tokenizer)
    del dense
    fast_config = T2NConfig(weights="q4_0", embeddings="q4_0", compute="fast")
    fast = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=fast_config, dtype=torch.float32).eval()
    # Few tokens at a time: a whole window would take the matmul for many rows, which is not the int4 kernel.
    results["kl fast"] = quality.compare(ours, fast, texts, chunk=FAST_ROWS)
    del ours, fast
    bench_minilm(results)


def same_tokens(ours: nn.Module, dense: nn.Module, tokenizer: object, count: int = 20) -> dict[str, int]:
    """Greedy tokens of the exact path against a dense model that holds the dequantized weights."""
    equal = 0
    for prompt in quality.PROMPTS:
        batch = tokenizer(prompt, return_tensors="pt")
        pair = [model.generate(**batch, max_new_tokens=count, do_sample=False) for model in (ours, dense)]
        equal += int(torch.equal(*pair))
    return {"prompts": len(quality.PROMPTS), "equal": equal, "tokens": count}


def bench_minilm(results: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    lines = quality.sentences()
    source = AutoModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    reference = quality.sentence_embeddings(source, tokenizer, lines)
    theirs = their_weights(MINILM, source, quantized_names(source))
    config = T2NConfig(weights="q4_0", embeddings="q4_0", modules_to_not_convert=[])
    ours = AutoModel.from_pretrained(MINILM, quantization_config=config, dtype=torch.float32).eval()
    results["cosine"] = {
        side: quality.cosine_distance(reference, quality.sentence_embeddings(model, tokenizer, lines))
        for side, model in (("ours", ours), ("theirs", theirs))
    }


def bench_torch(results: dict, runs: int) -> None:
    script = str(ROOT / "scripts" / "benchmarks" / "torch_speed.py")
    quantized = ["--weights", "q4_0", "--embeddings", "q4_0", "--compute", "fast"]
    # The fast path twice: in a bf16 model, and in the f32 model that its KL to the exact path is measured in.
    sides = (
        ("q4_0 fast", BF16, "bf16", quantized),
        ("q4_0 fast f32", MODEL, "f32", quantized),
        ("dense bf16", BF16, "bf16", []),
    )
    for name, folder, dtype, flags in sides:
        command = [sys.executable, script, str(folder), "--dtype", dtype, "--rounds", str(runs), *flags]
        results[f"torch {name}"] = json_of(command)


def versions() -> dict[str, str]:
    packages = ("t2n-hf", "torch", "transformers", "accelerate", "tract")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=("f32", "q4_0"), default=("f32", "q4_0"), help="what to export")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    store = OUT / "export.json"
    results = json.loads(store.read_text()) if store.exists() else {}
    work = {
        "export": lambda: bench_export(results, arguments.runs, arguments.kinds),
        "archive": lambda: bench_archive(results, arguments.runs),
        "quality": lambda: bench_quality(results),
        "torch": lambda: bench_torch(results, arguments.runs),
        "depth": lambda: export_scale.depth(results, arguments.runs),
        "size": lambda: export_scale.size(results, arguments.runs, OUT),
        "zoo": lambda: export_scale.zoo(results, OUT, str(programs_of("environment") / "python")),
    }
    for part in arguments.parts:
        print(f"measuring {part} ...", file=sys.stderr)
        work[part]()
        results["versions"] = versions()
        results.setdefault("runs", {})[part] = arguments.runs
        store.write_text(json.dumps(results, indent=1))
    write_page(ROOT / "docs" / "benchmarks.md", rows_of(results), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
