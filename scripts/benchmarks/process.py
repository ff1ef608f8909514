"""Whole processes under the clock: wall and CPU seconds and peak resident bytes, as the kernel accounts for them."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One finished process. `peak_rss_bytes` is that of its largest single process."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    output: str = ""

    def last_json(self) -> dict:
        """The JSON object that the last line of its output is."""
        return json.loads(self.output.strip().splitlines()[-1])


def run(command: Sequence[str], env: dict[str, str] | None = None) -> Run:
    """Run a command to its end; what it prints is thrown away unless it fails."""
    start = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, text=True
    )
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{output[-4000:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def alternate(commands: dict[str, Callable[[], Run]], runs: int) -> dict[str, list[Run]]:
    """Run each command `runs` times in turn (A B A B ...), so that a drifting machine is fair to all."""
    results: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            results[name].append(command())
    return results


def median(runs: Sequence[Run], field: str) -> float:
    return statistics.median(getattr(one, field) for one in runs)


def json_of(command: Sequence[str], env: dict[str, str] | None = None) -> dict:
    """Run a command whose last line of output is a JSON object, and return that."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
