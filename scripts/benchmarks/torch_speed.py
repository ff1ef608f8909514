"""Decode with one model at one thread in PyTorch and print tokens per second and memory as JSON.

torch_speed.py FOLDER --weights q4_0 --compute fast --dtype bf16
torch_speed.py FOLDER --dtype bf16                         (plain transformers, dense)
"""

import argparse
import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from t2n_hf import T2NConfig


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--weights")
    parser.add_argument("--embeddings")
    parser.add_argument("--compute", default="fast")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="bf16")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {}
    if arguments.weights:
        options["quantization_config"] = T2NConfig(
            weights=arguments.weights, embeddings=arguments.embeddings, compute=arguments.compute
        )
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype, **options).eval()
    prompt = torch.arange(100, 132)[None]
    speeds = []
    for turn in range(arguments.rounds + 1):
        past = model(prompt, use_cache=True).past_key_values
        token = torch.tensor([[7]])
        start = time.perf_counter()
        for _ in range(arguments.tokens):
            out = model(token, cache=past, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        if turn:
            speeds.append(arguments.tokens / (time.perf_counter() - start))
    print(json.dumps({"tokens_per_s": statistics.median(speeds), "footprint_bytes": model.get_memory_footprint()}))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
