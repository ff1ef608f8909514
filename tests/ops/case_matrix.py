"""The cases of all tests of this folder: what they call, and which version of tract runs them."""

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from op_harness import Case, expected, interface_for, write_archive
from torch import fx
from torch.utils import _pytree as pytree

from t2n_hf.export.lower import lower
from t2n_hf.nnef.versions import least_version
from t2n_hf.trace.capture import capture

__all__ = ["Built", "Call", "built_cases", "cases", "outcomes"]

HERE = Path(__file__).parent
WORKER = """
import sys, types
sys.path[:0] = [sys.argv[1], sys.argv[2]]
package = sys.modules["t2n_hf"] = types.ModuleType("t2n_hf")
package.__path__ = [sys.argv[2] + "/t2n_hf"]
from pathlib import Path
import numpy as np
from t2n_hf.tract.bindings import load, to_numpy
for line in sys.stdin:
    case = Path(line.strip())
    (case / "started").touch()
    try:
        runnable = load(str(case / "model")).into_runnable()
        for path in sorted(case.glob("in_*.npz")):
            inputs = np.load(path)
            results = runnable.run([inputs[f"arr_{i}"] for i in range(len(inputs.files))])
            np.savez(path.with_name(path.name.replace("in_", "out_")), *map(to_numpy, results))
    except Exception as error:
        (case / "error").write_text(str(error).partition("Stack backtrace")[0].strip() or "failed")
    (case / "done").touch()
"""


@dataclass(frozen=True, order=True)
class Call:
    """A call in a captured graph: the overload, the dtype of its first tensor, and whether lengths are free."""

    overload: str
    dtype: str
    free: bool


@dataclass(frozen=True)
class Built:
    """A case on disk. `calls` are those of the captured graph, `written` those that emitters wrote."""

    case: Case
    folder: Path
    calls: frozenset[Call]
    written: frozenset[Call]
    least: str


def cases() -> Iterator[tuple[str, Case]]:
    """Every case of the tests beside this file, as <file>/<case>."""
    for path in sorted(HERE.glob("test_ops_*.py")):
        for case in getattr(importlib.import_module(path.stem), "CASES", []):
            yield f"{path.stem.removeprefix('test_ops_')}/{case.name}", case


def built_cases(root: Path) -> dict[str, Built]:
    """Capture, lower and write all cases below `root`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on slow forms of its operators
        return {name: _built(case, root / name.replace("/", "__")) for name, case in cases()}


def _built(case: Case, folder: Path) -> Built:
    folder.mkdir()
    interface = interface_for(case)
    captured = capture(interface, case.dtype, "whole")
    calls = _calls(captured.graph)
    lowered = lower(captured, {}, dtype="f16" if case.dtype is torch.float16 else "f32")
    write_archive(lowered, dict(interface.module.state_dict(keep_vars=True)), folder / "model", case.dtype)
    for number, inputs in enumerate([case.inputs, *case.others]):
        np.savez(folder / f"in_{number}.npz", *[x.numpy() for x in inputs])
    return Built(case, folder, calls, _calls(captured.graph), least_version(lowered.document))


def _calls(graph: fx.Graph) -> frozenset[Call]:
    return frozenset(call for node in graph.nodes if node.op == "call_function" for call in _call(node))


def _call(node: fx.Node) -> list[Call]:
    results = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    given = [source.meta["val"] for source in node.all_input_nodes]
    tensors = [value for value in (*given, *results) if isinstance(value, torch.Tensor)]
    if not results:
        return []
    free = any(isinstance(length, torch.SymInt) for value in results for length in value.shape)
    return [Call(str(node.target), str(tensors[0].dtype).removeprefix("torch."), free)]


def outcomes(built: dict[str, Built], tract_folder: Path) -> dict[str, str]:
    """Run all cases with one tract: "right", or what went wrong. A case that aborts the process is that case's."""
    waiting = dict(built)
    for mine in built.values():
        for path in (*mine.folder.glob("out_*.npz"), *(mine.folder / name for name in ("started", "done", "error"))):
            path.unlink(missing_ok=True)
    while waiting:
        lines = "".join(f"{mine.folder}\n" for mine in waiting.values())
        command = [sys.executable, "-I", "-c", WORKER, str(tract_folder), str(HERE.parents[1])]
        subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=1200)
        for mine in waiting.values():
            if (mine.folder / "started").exists() and not (mine.folder / "done").exists():
                (mine.folder / "error").write_text("tract aborted the process")
                (mine.folder / "done").touch()
        waiting = {name: mine for name, mine in waiting.items() if not (mine.folder / "done").exists()}
    return {name: _outcome(mine) for name, mine in built.items()}


def _outcome(mine: Built) -> str:
    if (mine.folder / "error").exists():
        return json.dumps((mine.folder / "error").read_text().splitlines()[-1].strip()[:160])
    for number, inputs in enumerate([mine.case.inputs, *mine.case.others]):
        outputs = np.load(mine.folder / f"out_{number}.npz")
        for place, tensor in enumerate(expected(mine.case, inputs)):
            got, want = outputs[f"arr_{place}"], tensor.detach().numpy()
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                return f"{got.dtype} {got.shape} for {want.dtype} {want.shape}"
            finite = np.abs(want[np.isfinite(want)]) if want.dtype.kind == "f" else np.ones(1)
            scale = max(1.0, float(finite.max(initial=0)))
            if not np.allclose(got, want, mine.case.tolerance, mine.case.tolerance * scale, equal_nan=True):
                return "other values"
    return "right"
