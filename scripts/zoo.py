"""Export models of the zoo (tests/zoo), compare tract with PyTorch, and print what came of each.

`scripts/zoo.py` runs all of them, `scripts/zoo.py decoder bert` some families and models. `--write` puts the outcomes
into docs/zoo.md, over those of an earlier run for the same models.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from zoo import selected  # noqa: E402 - found by the lines above
from zoo.check import SETTINGS, Outcome  # noqa: E402
from zoo.pool import check_all  # noqa: E402
from zoo.table import page, row  # noqa: E402

KEPT = ROOT / "bench-out" / "zoo.json"
PAGE = ROOT / "docs" / "zoo.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="families and models; all of them when none is given")
    parser.add_argument("--setting", choices=[*SETTINGS], default="default", help="options of the export")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md")
    parser.add_argument("--again", action="store_true", help="only models that were not right when last run")
    options = parser.parse_args()
    kept = {name: Outcome(**fields) for name, fields in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}
    entries = selected(options.words)
    if options.again:
        entries = [entry for entry in entries if entry.name not in kept or kept[entry.name].status != "right"]
    outcomes = []
    for outcome in check_all(entries, setting=options.setting, processes=options.processes):
        outcomes.append(outcome)
        print(f"{row(outcome)} {outcome.seconds:.1f} s", flush=True)
        if options.setting == "default":
            kept[outcome.name] = outcome
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps({name: found.to_json() for name, found in sorted(kept.items())}, indent=1))
    right = sum(outcome.status == "right" for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right")
    if options.write:
        names = ("t2n-hf", "torch", "transformers", "tract")
        PAGE.write_text(page(kept, ", ".join(f"{name} {version(name)}" for name in names) + "."))
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
