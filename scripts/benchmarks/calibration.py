"""What calibration is worth: how far Q4_0 moves SmolLM2 and MiniLM with scales by signed maximum, and by importance.

Calibrated on the first two chapters of Alice's Adventures in Wonderland, tested on the Constitution of the United
States: `python scripts/benchmarks/calibration.py [--tokens 4096] [--json]`. One run takes about five minutes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import quality
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from t2n_hf import T2NConfig, calibrate
from t2n_hf.tensor import QTensorTractScaleOnly

CACHE = Path(__file__).resolve().parent.parent.parent / ".cache"
SMOLLM2 = CACHE / "SmolLM2-135M-Instruct"
MINILM = CACHE / "all-MiniLM-L6-v2"
TEXT = Path(__file__).resolve().parent.parent / "data" / "alice-in-wonderland.txt"
MATRICES = {"matrices": {}, "matrices, embeddings and head": {"embeddings": "q4_0"}}


def calibrated(folder: Path, out: Path) -> dict[str, float]:
    start = time.perf_counter()
    importance = calibrate(folder, [TEXT.read_text()])
    importance.save(out)
    return {"tokens": importance.tokens, "seconds": time.perf_counter() - start, "file_bytes": out.stat().st_size}


def kl_rows(importance: Path, tokens: int) -> dict[str, dict[str, float]]:
    """KL per token of SmolLM2 (f32) and its Q4_0, computed exactly."""
    texts = quality.windows(AutoTokenizer.from_pretrained(SMOLLM2), least=tokens)
    source = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    rows = {}
    for what, options in MATRICES.items():
        for how, path in (("signed maximum", None), ("importance", importance)):
            config = T2NConfig("q4_0", importance=path, **options)
            other = AutoModelForCausalLM.from_pretrained(SMOLLM2, quantization_config=config, dtype=torch.float32)
            rows[f"SmolLM2, {what}: {how}"] = quality.compare(source, other.eval(), texts)
    return rows


def cosine_rows(importance: Path) -> dict[str, dict[str, float]]:
    """Distance of MiniLM's sentence embeddings from those of its f32 weights."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    lines = quality.sentences()
    source = AutoModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    reference = quality.sentence_embeddings(source, tokenizer, lines)
    rows = {}
    for how, path in (("signed maximum", None), ("importance", importance)):
        config = T2NConfig("q4_0", importance=path, embeddings="q4_0", modules_to_not_convert=[])
        other = AutoModel.from_pretrained(MINILM, quantization_config=config, dtype=torch.float32).eval()
        found = quality.sentence_embeddings(other, tokenizer, lines)
        distance = quality.cosine_distance(reference, found)
        rows[f"MiniLM: {how}"] = {"cosine": distance, "mse": float((found - reference).square().mean())}
    return rows


def best_s(function: Callable[[], object], runs: int = 7) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def speed_row() -> dict[str, float]:
    """Values quantized per second by both rules, on one thread."""
    torch.set_num_threads(1)
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(2048, generator=torch.Generator().manual_seed(1))
    plain = best_s(lambda: QTensorTractScaleOnly.quantize(weight))
    weighted = best_s(lambda: QTensorTractScaleOnly.quantize(weight, importance=importance))
    return {"plain": weight.numel() / plain, "importance": weight.numel() / weighted, "ratio": weighted / plain}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of the test text, at least")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {model: Path(folder, f"{model.name}.safetensors") for model in (MINILM, SMOLLM2)}
        for model, file in files.items():
            results[f"{model.name}: calibration"] = calibrated(model, file)
        results.update(cosine_rows(files[MINILM]))
        results.update(kl_rows(files[SMOLLM2], arguments.tokens))
    results["speed of quantizing, values per second, one thread"] = speed_row()
    if arguments.json:
        print(json.dumps(results, indent=1))
        return 0
    for name, row in results.items():
        print(f"{name:<58} {'  '.join(f'{key} {value:.6g}' for key, value in row.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
