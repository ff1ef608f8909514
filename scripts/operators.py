"""Make docs/operators.md: every overload with an emitter, with dtypes, cases and limits. `--write` keeps it.

Captures and lowers all cases of tests/ops (minutes); that tract computes them right is for the tests to say.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/ops")]

import torch  # noqa: E402 - found by the lines above
from case_matrix import built_cases  # noqa: E402
from operator_page import page  # noqa: E402

PAGE = ROOT / "docs/operators.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/operators.md; without it, say if it differs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        built = built_cases(Path(scratch))
    text = page({n: mine.calls for n, mine in built.items()}, {n: mine.written for n, mine in built.items()})
    if options.write:
        PAGE.write_text(text)
    same = PAGE.exists() and PAGE.read_text() == text
    print(f"{PAGE.relative_to(ROOT)}: {'up to date' if same else 'differs; run this with --write'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
