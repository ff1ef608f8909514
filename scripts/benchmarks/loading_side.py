"""The parent's hold on one side of the loading benchmark, and questions to several sides in turn."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from benchmarks.loading_worker import Worker

SCRIPTS = Path(__file__).resolve().parent.parent


class Side:
    """A worker process. `loaded` is what it said of loading. Leaving the `with` block ends it.

    `launcher` goes before the command: what puts the process into a cgroup, say (`systemd-run --user --scope ...`).
    """

    def __init__(self, spec: dict[str, Any], log: Path, python: str = sys.executable, launcher: Sequence[str] = ()):
        threads = str(spec.get("threads", 1))
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.spec, self._log = spec, log
        with log.open("a") as errors:
            self._log_start = errors.tell()
            self._process = subprocess.Popen(
                [*launcher, python, str(SCRIPTS / "benchmarks" / "loading_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )
        self.loaded = self._ask(spec)

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        """Have the worker do one thing and wait for its answer."""
        return self._ask({"do": do, **options})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text()[self._log_start :][-3000:]
            raise RuntimeError(f"{self.spec} ended with {self._process.wait()} on {message}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class InlineSide(Side):
    """The same within this process: for a quick run, whose figures mean nothing."""

    def __init__(self, spec: dict[str, Any]):
        with torch.inference_mode():
            self._worker = Worker(spec)
            self.spec, self.loaded = spec, self._worker.loaded()

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return getattr(self._worker, do)(**options)

    def close(self) -> None:
        del self._worker


def in_turn(sides: Mapping[str, Side], runs: int, do: str, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Ask every side `runs` times, one after the other (A B A B ...)."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, side in sides.items():
            answers[name].append(side.ask(do, **options))
    return answers


def middle(answers: list[dict[str, Any]], *fields: str) -> dict[str, float]:
    """The median of each field."""
    return {field: statistics.median(one[field] for one in answers) for field in fields}
