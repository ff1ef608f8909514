"""The main job on SmolLM2-135M-Instruct: load quantized, generate, export, check in tract, generate from the archive.

Prints sizes, memory, times and agreement; ends with status 1 when the archive's greedy tokens are not PyTorch's.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from t2n_hf import T2NConfig, TractModelForCausalLM, export_nnef
from t2n_hf.export.report import format_bytes, peak_rss_bytes

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France? Answer in one sentence."


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def row(what: str, value: str) -> None:
    """Say one fact as soon as it is known: the whole takes minutes."""
    print(f"{what:<29}{value}", flush=True)


def greedy(model: torch.nn.Module, ids: torch.Tensor, count: int) -> list[int]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint folder")
    parser.add_argument("--out", type=Path, help="keep the export here (default: a temporary folder)")
    parser.add_argument("--tokens", type=int, default=20, help="greedy tokens to compare")
    arguments = parser.parse_args()
    if not sys.stderr.isatty():
        disable_progress_bar()
    # The exact path works in pieces that fit a core's cache; more threads wait for each other more than they help.
    torch.set_num_threads(1)
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    config = T2NConfig(weights="q4_0", embeddings="q4_0")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, quantization_config=config, dtype=torch.float32)
    row("loaded as q4_0", f"{time.perf_counter() - start:.1f} s")
    row("checkpoint", format_bytes(folder_bytes(arguments.model)))
    row("in memory", format_bytes(model.get_memory_footprint()))

    chat = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    start = time.perf_counter()
    expected = greedy(model, ids, arguments.tokens)
    row("PyTorch, exact path", f"{len(expected) / (time.perf_counter() - start):.1f} tokens/s")
    row("answer", tokenizer.decode(expected, skip_special_tokens=True).strip())

    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch) / "export"
        report = export_nnef(model, out, tokenizer=tokenizer, check=True, overwrite=arguments.out is not None)
        print(f"\n{report}\n", flush=True)
        row("export", f"{report.seconds['total']:.1f} s, archive {format_bytes(report.archive.stat().st_size)}")
        row("checked in tract", f"max relative error {report.max_rel_error:.2g}")
        del model
        archive = TractModelForCausalLM.from_pretrained(out)
        start = time.perf_counter()
        got = greedy(archive, ids, arguments.tokens)
        row("tract, from the archive", f"{len(got) / (time.perf_counter() - start):.1f} tokens/s")
        archive.close()
    agreement = sum(a == b for a, b in zip(expected, got, strict=False))
    row("same greedy tokens", f"{agreement} of {len(expected)}")
    row("peak memory of this process", format_bytes(peak_rss_bytes()))
    return 0 if got == expected else 1


if __name__ == "__main__":
    sys.exit(main())
