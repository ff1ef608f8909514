"""Quantize a checkpoint with torch_to_nnef's min-max Q4_0 and write the values back as floats, to judge by PyTorch.

Runs in scripts/baselines/environment: `torch_to_nnef_quantize.py CHECKPOINT OUT.safetensors`, the names of the weights
to quantize on standard input, so that both tools quantize the same ones.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch_to_nnef.tensor.quant import fp_to_tract_q4_0_with_min_max_calibration


def main(source: Path, out: Path) -> int:
    weights = load_file(source / "model.safetensors")
    for name in sys.stdin.read().split():
        quantized = fp_to_tract_q4_0_with_min_max_calibration(weights[name].float())
        weights[name] = quantized.decompress().to(torch.float32).reshape(weights[name].shape).clone()
    save_file(weights, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
