"""Run an archive in tract, in a process of its own."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, final

import numpy as np

from t2n_hf.errors import FormatError, TractError
from t2n_hf.nnef.signature import read_signature
from t2n_hf.tract.frames import Frame, read_frame, write_frame
from t2n_hf.tract.version import require_tract

__all__ = ["TensorSpec", "TractRunner"]

# Importing the package imports torch and transformers, seconds that the worker does not need. An empty module with the
# package's path stands in for it: submodules are found as usual, `t2n_hf/__init__.py` is not executed.
_BOOTSTRAP: Final = """
import json, runpy, sys, types
sys.path[:], where = json.loads(sys.argv[1])
sys.modules["t2n_hf"] = package = types.ModuleType("t2n_hf")
package.__path__ = where
runpy.run_module("t2n_hf.tract.worker", run_name="__main__")
"""
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_LAST_WORDS_LENGTH: Final = 4000
# Frames of a Rust backtrace: addresses of the interpreter, at great length.
_BACKTRACE: Final = re.compile(r"^(stack backtrace:| +\d+: .*| +at .*)\n", re.MULTILINE)
_GRACE_S: Final = 2.0


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: numpy's name of the dtype, and a shape of numbers and symbolic expressions ("S+P")."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@final
class TractRunner:
    """An archive, loaded in a worker process. A context manager; `close` may be called any number of times.

    Args:
        archive: `.nnef.tgz`, `.nnef.tar` or folder.
        timeout_s: longest time for one call, loading included; None waits for ever.
        tract_folder: folder that holds the package `tract` to run with (an unpacked wheel); None takes the installed
            one.

    Raises TractError when tract is missing, refuses the archive, or ends while it loads it; ArchiveError or FormatError
    when it holds no graph.
    """

    def __init__(
        self, archive: str | Path, *, timeout_s: float | None = None, tract_folder: str | Path | None = None
    ) -> None:
        if tract_folder is None:
            require_tract()
        self.archive = Path(archive)
        if not self.archive.exists():
            raise TractError(f"{self.archive}: no such archive")
        self._timeout_s = timeout_s
        self._held: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the finalizer
        first = [] if tract_folder is None else [str(Path(tract_folder).absolute())]
        path = json.dumps([[*first, *sys.path], [str(_PACKAGE)]])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOTSTRAP, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._watch = _Watch(self._process)
        self._finalizer = weakref.finalize(self, _end, self._process, self._log)
        try:
            outputs = read_signature(self.archive).outputs
            message = {"op": "load", "path": str(self.archive.absolute()), "outputs": outputs}
            answer, _ = self._call(message, {}, "loading")
        except BaseException:
            self.close()
            raise
        self.inputs = {spec["name"]: _tensor_spec(spec) for spec in answer["inputs"]}
        self.outputs = {spec["name"]: _tensor_spec(spec) for spec in answer["outputs"]}
        self.version: str = answer["version"]

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Run once and return outputs by name: those named, or all of them.

        Raises TractError for inputs that are missing, unknown, or of another dtype or rank, and for what tract refuses.
        """
        names = list(self.outputs if outputs is None else outputs)
        self._check_names(names, self.outputs, "output")
        self._check(inputs, optional=())
        return self._call({"op": "run", "outputs": names}, inputs, "running")[1]

    def step(self, inputs: Mapping[str, np.ndarray], feedback: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Run once and keep outputs in the worker, to be inputs of the next step.

        Args:
            inputs: what is not kept. An input that is neither given nor kept yet, but is fed back, begins empty: its
                symbolic lengths are 0.
            feedback: name of an output -> name of the input that takes it in the next step.

        Returns the outputs that are not fed back. Raises TractError as `run` does.
        """
        self._check_names(feedback, self.outputs, "output")
        self._check_names(feedback.values(), self.inputs, "input")
        self._check(inputs, optional=[*feedback.values(), *self._held])
        return self._call({"op": "step", "feedback": dict(feedback)}, inputs, "running")[1]

    def crop(self, names: Iterable[str], *, axis: int, length: int) -> None:
        """Cut kept inputs to their first `length` positions along `axis`. Raises TractError for one not kept."""
        self._call({"op": "crop", "names": list(names), "axis": axis, "length": length}, {}, "cropping")

    def hold(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Give inputs that stay the same in the steps to come; what was held before is let go.

        Raises TractError for inputs that are unknown, or of another dtype or rank.
        """
        self._check_names(inputs, self.inputs, "input")
        self._check(inputs, optional=self.inputs)
        self._call({"op": "hold"}, inputs, "taking inputs")
        self._held = frozenset(inputs)

    def take(self, names: Iterable[str], rows: Sequence[int]) -> None:
        """Let kept and held inputs become these rows of theirs, along the first axis; a row may come several times."""
        self._check_names(names, self.inputs, "input")
        self._call({"op": "take", "names": list(names), "rows": [int(row) for row in rows]}, {}, "taking rows")

    def reset(self) -> None:
        """Forget what the steps have kept; what is held stays."""
        self._call({"op": "reset"}, {}, "resetting")

    def close(self) -> None:
        """End the worker and wait for it."""
        self._finalizer()

    def __enter__(self) -> "TractRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray], doing: str) -> Frame:
        with self._lock:
            if not self._finalizer.alive:
                raise TractError(f"{self.archive.name}: this runner is closed")
            try:
                with self._watch.limit(self._timeout_s):
                    frame = self._exchange(message, arrays)
            except KeyboardInterrupt:
                # The answer will still arrive and would be taken for that of the next call.
                self.close()
                raise
            except ValueError:  # what a closed stream raises
                if self._finalizer.alive:
                    raise
                frame = None
            if frame is None:
                raise self._died(doing)
        if "error" in frame[0]:
            raise TractError(f"{self.archive.name}: tract failed while {doing}: {frame[0]['error']}")
        return frame

    def _exchange(self, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Frame | None:
        try:
            write_frame(self._process.stdin, message, arrays)  # type: ignore[arg-type]
            return read_frame(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            return None
        except FormatError:
            if not self._ends() and not self._watch.expired:
                raise
            return None  # it ended in the middle of its answer

    def _ends(self) -> bool:
        """Say whether the worker has ended; its end of the pipe is closed a little before that can be seen."""
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _died(self, doing: str) -> TractError:
        code = self._process.wait()
        try:
            self._log.seek(0)
            words = _BACKTRACE.sub("", self._log.read().decode(errors="replace"))[-_LAST_WORDS_LENGTH:].strip()
        except ValueError:  # closed meanwhile
            words = ""
        if not self._finalizer.alive:
            return TractError(f"{self.archive.name}: this runner was closed by another thread while {doing}")
        self.close()
        if self._watch.expired:
            return TractError(f"{self.archive.name}: no answer within {self._timeout_s} s while {doing}; worker ended")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = f"its last words:\n{words}" if words else "it said nothing"
        return TractError(f"{self.archive.name}: the tract process ended with {how} while {doing}; {said}")

    def _check_names(self, names: Iterable[str], known: Mapping[str, TensorSpec], what: str) -> None:
        unknown = [name for name in names if name not in known]
        if unknown:
            raise TractError(f"{self.archive.name} has no {what} {', '.join(unknown)}; it has {', '.join(known)}")

    def _check(self, inputs: Mapping[str, np.ndarray], optional: Iterable[str]) -> None:
        self._check_names(inputs, self.inputs, "input")
        missing = sorted(set(self.inputs) - set(inputs) - set(optional))
        if missing:
            raise TractError(f"{self.archive.name} needs input {', '.join(missing)}, which was not given")
        for name, array in inputs.items():
            spec = self.inputs[name]
            if array.dtype.name != spec.dtype or array.ndim != len(spec.shape):
                raise TractError(
                    f"{self.archive.name}: input {name} is {array.dtype} of shape {list(array.shape)}, "
                    f"expected {spec.dtype} of shape [{', '.join(map(str, spec.shape))}]"
                )


@final
class _Watch:
    """Ends a process that takes too long. Knows the process only, so that its timer does not keep a runner alive."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.expired = False

    @contextmanager
    def limit(self, seconds: float | None) -> Iterator[None]:
        """Kill the process when the block takes longer than `seconds`; None sets no limit."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()


def _tensor_spec(spec: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(int(dim) if dim.isdigit() else dim for dim in spec["shape"])
    return TensorSpec(name=spec["name"], dtype=spec["dtype"], shape=shape)


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Ask the worker to end by ending its input, insist after a while, and reap it."""
    try:
        if process.stdin is not None:
            process.stdin.close()
    except OSError:
        pass  # it has ended already
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    log.close()
