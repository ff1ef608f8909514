"""Export a checkpoint to Q4_0 under a limit of memory. Prints seconds and the peak over the interpreter's own as JSON.

loading_export.py FOLDER OUT --limit BYTES
"""

import argparse
import gc
import json
import sys
import time

import torch
from benchmarks import loading_memory as memory
from benchmarks.loading_models import warm_interpreter

from t2n_hf import export_nnef


def measure(given: list[str]) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--limit", type=int, required=True)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    warm_interpreter({"kind": "ours", "config": {}})
    gc.collect()
    baseline = memory.resident()["rss"]
    memory.reset_peak()
    start = time.perf_counter()
    export_nnef(
        arguments.folder,
        arguments.out,
        weights="q4_0",
        embeddings="q4_0",
        lm_head="q4_0",
        device_map="auto",
        max_memory={"cpu": arguments.limit},
        check=False,
        overwrite=True,
    )
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak": memory.resident()["peak"] - baseline}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
