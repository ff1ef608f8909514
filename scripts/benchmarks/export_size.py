"""Export a checkpoint and print, as one JSON object, the seconds of each phase of the export."""

import argparse
import json
import sys
from pathlib import Path

import torch

from t2n_hf import export_nnef


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--weights")
    parser.add_argument("--embeddings")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    options = {name: arguments[name] for name in ("dtype", "weights", "embeddings") if arguments[name]}
    report = export_nnef(arguments["model"], arguments["out"], check=False, overwrite=True, **options)
    print(json.dumps({"seconds": report.seconds, "archive": str(report.archive)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
