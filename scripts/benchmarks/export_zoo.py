"""Export decoders of the zoo one after the other and say how long each took: one JSON object, null for a failure.

Models are saved checkpoints; loading them, and the first model, which pays for what a process loads once, do not count.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from zoo import selected

from t2n_hf import export_nnef


def saved(out: Path, words: list[str]) -> list[str]:
    """Save the decoders of the zoo, or those models that are named; give the names of those that can be saved."""
    names = []
    for entry in selected(words or ["decoder"]):
        try:
            entry.make().model.save_pretrained(out / entry.name)
        except Exception as error:  # noqa: BLE001 - the other models are still to be measured
            print(f"{entry.name}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            names.append(entry.name)
    return names


def seconds_of(folder: Path, out: Path) -> float | None:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        start = time.perf_counter()
        export_nnef(model, out, check=False, overwrite=True)
    except Exception as error:  # noqa: BLE001 - the other models are still to be measured
        print(f"{folder.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="saved checkpoints; with --save, names of models (default: all)")
    parser.add_argument("--save", type=Path, help="save the decoders here, and print their names, instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.save is not None:
        print(json.dumps(saved(arguments.save, arguments.folders)))
        return 0
    folders = [Path(name) for name in arguments.folders]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "export"
        seconds_of(folders[0], out)
        print(json.dumps({folder.name: seconds_of(folder, out) for folder in folders}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
