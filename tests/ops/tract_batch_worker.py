"""Run every archive below a folder in tract: <case>/model, <case>/in_<n>.npz -> <case>/out_<n>.npz or <case>/error.

tract may abort the process; <case>/started tells the caller which case did it.
"""

import sys
from pathlib import Path

import numpy as np
import tract


def run_case(case: Path) -> None:
    loader = tract.nnef().with_tract_transformers().with_tract_extra().with_extended_identifier_syntax()
    runnable = loader.load(str(case / "model")).into_runnable()
    for path in sorted(case.glob("in_*.npz")):
        inputs = np.load(path)
        results = runnable.run([inputs[f"arr_{i}"] for i in range(len(inputs.files))])
        np.savez(path.with_name(path.name.replace("in_", "out_")), *[result.to_numpy() for result in results])


for folder in sorted(Path(sys.argv[1]).iterdir()):
    if (folder / "started").exists():
        continue
    (folder / "started").touch()
    try:
        run_case(folder)
    except Exception as error:  # noqa: BLE001
        (folder / "error").write_text(str(error).partition("Stack backtrace")[0])
    (folder / "done").touch()
