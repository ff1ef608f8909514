"""Worker processes that check models of the zoo; one that hangs or dies is replaced, and its model says so."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from zoo.check import Outcome
from zoo.entry import Entry

__all__ = ["TIMEOUT_S", "Worker", "check_all"]

TIMEOUT_S: Final = 900.0
_TESTS: Final = Path(__file__).resolve().parents[1]
_LAST_WORDS: Final = 600
_GRACE_S: Final = 10.0


class Worker:
    """One process that checks models, started when it is first needed. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()

    def check(self, entry: Entry, setting: str = "default", timeout_s: float = TIMEOUT_S) -> Outcome:
        """Check one model. A process that ends, or says nothing for `timeout_s`, is a failure of the model."""
        process = self._running()
        expired = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (expired.set(), process.kill()))
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{entry.name} {setting}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return Outcome(**json.loads(answer))
        note = f"no answer within {timeout_s:g} s" if expired.is_set() else f"the process ended: {self._last_words()}"
        self._end()
        return Outcome(name=entry.name, family=entry.family, status="failed", note=note)

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zoo.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
            )
        return self._process

    def _last_words(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GRACE_S)
        self._log.seek(0)
        return " ".join(self._log.read().decode(errors="replace")[-_LAST_WORDS:].split())

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process = None

    def close(self) -> None:
        self._end()
        self._log.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_all(entries: Sequence[Entry], *, setting: str = "default", processes: int = 1) -> Iterator[Outcome]:
    """Check many models in `processes` processes; outcomes come as they are there."""
    local = threading.local()
    workers: list[Worker] = []

    def one(entry: Entry) -> Outcome:
        if not hasattr(local, "worker"):
            local.worker = Worker()
            workers.append(local.worker)
        return local.worker.check(entry, setting)

    try:
        with ThreadPoolExecutor(processes) as threads:
            for future in as_completed([threads.submit(one, entry) for entry in entries]):
                yield future.result()
    finally:
        for worker in workers:
            worker.close()
