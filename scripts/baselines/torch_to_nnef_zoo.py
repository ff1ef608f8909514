"""Export saved decoders with torch_to_nnef, without a cache and at one length: how long each takes, as JSON.

The other side of the zoo in scripts/bench_export.py, in its own environment. null stands for a model that it cannot
export. Loading the models, and the first export, do not count.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch_to_nnef.export import export_model_to_nnef
from torch_to_nnef.inference_target.tract import TractNNEF
from transformers import AutoModelForCausalLM

TRACT = "0.23.8"


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # Without a mask, models look for packed sequences by operators that it does not know.
        return self.model(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits


def target(scratch: Path) -> TractNNEF:
    binary = scratch / "tract"
    binary.write_text(f"#!/bin/sh\necho tract {TRACT}\n")
    binary.chmod(0o755)
    return TractNNEF(TRACT, check_io=False, specific_tract_binary_path=binary)


def seconds_of(folder: Path, scratch: Path) -> float | None:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager"
        ).eval()
        start = time.perf_counter()
        export_model_to_nnef(
            model=Logits(model),
            args=(torch.arange(3, 15)[None],),
            file_path_export=scratch / f"{folder.name}.nnef.tgz",
            inference_target=target(scratch),
            input_names=["input_ids"],
            output_names=["logits"],
            log_level=40,
        )
    except BaseException as error:  # noqa: BLE001 - it may exit; the other models are still to be measured
        print(f"{folder.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None
    return time.perf_counter() - start


def main() -> int:
    torch.set_num_threads(1)
    folders = [Path(name) for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as scratch:
        seconds_of(folders[0], Path(first))
        print(json.dumps({folder.name: seconds_of(folder, Path(scratch)) for folder in folders}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
