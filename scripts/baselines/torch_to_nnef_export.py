"""Export a causal LM with torch_to_nnef_llm, without its check: the other side of scripts/bench_export.py.

Runs in an environment of its own (scripts/baselines/environment). tract is not needed for the export itself, but
`TractNNEF` asks its binary for a version: a two-line shell script answers.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from torch_to_nnef.inference_target.tract import TractNNEF
from torch_to_nnef_llm.exporter import LLMExporter

TRACT = "0.23.8"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("f32", "f16"), default="f32")
    parser.add_argument("--q4_0", action="store_true", help="min-max Q4_0 with embeddings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        binary = Path(scratch) / "tract"
        binary.write_text(f"#!/bin/sh\necho tract {TRACT}\n")
        binary.chmod(0o755)
        target = TractNNEF(TRACT, check_io=False, specific_tract_binary_path=binary)
        exporter = LLMExporter.load(local_dir=arguments.model, force_module_dtype=arguments.dtype)
        exporter.dump_with_inference_target(
            target,
            arguments.out,
            compression_method="min_max_q4_0_with_embeddings" if arguments.q4_0 else None,
            no_verify=True,
            check_inference_modes=False,
            wrapper_io_check=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
