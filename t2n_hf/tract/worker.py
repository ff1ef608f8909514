"""The process in which tract runs an archive: one frame in, one frame out, until its input ends.

tract can abort the process that it runs in, so it never runs in ours. The runner starts this module with an empty
stand-in for the package `t2n_hf` (see `runner._BOOTSTRAP`), so that neither torch nor transformers is imported: it must
import numpy, tract and this package's `bindings`, `frames` and `errors` only.

Messages (key "op") and their answers; any answer may be {"error": text} instead:
    load   path, outputs (names)          -> inputs and outputs [{name, dtype, shape}], version
    run    outputs (names), arrays        -> arrays: the asked outputs
    step   feedback {output: input}, arrays -> arrays: the outputs that are not fed back; those stay here
    hold   arrays                         -> the arrays are inputs of every step, until the next hold; no others are
    crop   names (inputs), axis, length   -> kept inputs are cut to `length` along `axis`
    take   names (inputs), rows           -> kept and held inputs become these rows of theirs, along axis 0
    reset                                 -> kept inputs are forgotten; held ones stay
"""

import os
import sys
import threading
import time
from typing import Any, BinaryIO, final

import numpy as np
import tract

from t2n_hf.tract.bindings import describe, load, to_numpy, to_tract
from t2n_hf.tract.frames import Frame, read_frame, write_frame

__all__ = ["main"]

_PARENT_POLL_S = 0.5


@final
class _Loaded:
    """A loaded archive and the tensors that are kept between steps, by the name of the input that takes them."""

    def __init__(self, path: str, names: list[str]) -> None:
        model = load(path)
        self.inputs = [_spec(model.input_name(i), model.input_fact(i)) for i in range(model.input_count())]
        # tract names an output by the node that computes it, the runner by the text of the graph.
        facts = [model.output_fact(i) for i in range(model.output_count())]
        self.outputs = [_spec(name, fact) for name, fact in zip(names, facts, strict=True)]
        self._runnable = model.into_runnable()
        self._kept: dict[str, Any] = {}
        self._held: dict[str, Any] = {}

    def run(self, arrays: dict[str, np.ndarray], wanted: list[str]) -> dict[str, np.ndarray]:
        """Run once and give the outputs named in `wanted`."""
        results = self._results([arrays[spec["name"]] for spec in self.inputs])
        return {name: to_numpy(results[name]) for name in wanted}

    def step(self, arrays: dict[str, np.ndarray], feedback: dict[str, str]) -> dict[str, np.ndarray]:
        """Run once on `arrays` and the kept tensors, keep the outputs in `feedback`, give the others."""
        given = {**self._held, **self._kept, **arrays}
        fed = set(feedback.values())
        missing = [spec["name"] for spec in self.inputs if spec["name"] in fed and spec["name"] not in given]
        lengths = self._lengths(given) if missing else {}
        values = [_empty(spec, lengths) if spec["name"] in missing else given[spec["name"]] for spec in self.inputs]
        results = self._results(values)
        self._kept = {into: results.pop(name) for name, into in feedback.items()}
        return {name: to_numpy(tensor) for name, tensor in results.items()}

    def _lengths(self, given: dict[str, Any]) -> dict[str, int]:
        """Values of the symbols that are the length of an axis of what is given."""
        shapes = [(spec["shape"], _shape_of(given[spec["name"]])) for spec in self.inputs if spec["name"] in given]
        return {dim: size for dims, sizes in shapes for dim, size in zip(dims, sizes, strict=True)}

    def hold(self, arrays: dict[str, np.ndarray]) -> None:
        """Take `arrays` as inputs of the steps to come, in place of those held before."""
        self._held = {name: to_tract(array) for name, array in arrays.items()}

    def take(self, names: list[str], rows: list[int]) -> None:
        """Make kept and held tensors the given rows of what they are."""
        for tensors in (self._kept, self._held):
            mine = [name for name in names if name in tensors]
            tensors.update({name: to_tract(to_numpy(tensors[name])[rows]) for name in mine})

    def crop(self, names: list[str], axis: int, length: int) -> None:
        """Cut kept tensors to their first `length` positions along `axis`."""
        cut = (slice(None),) * axis + (slice(length),)
        self._kept.update({name: to_tract(to_numpy(self._kept[name])[cut]) for name in names})

    def reset(self) -> None:
        """Forget the kept tensors."""
        self._kept = {}

    def _results(self, values: list[Any]) -> dict[str, Any]:
        names = [spec["name"] for spec in self.outputs]
        return dict(zip(names, self._runnable.run(values), strict=True))


def _spec(name: str, fact: Any) -> dict[str, Any]:  # noqa: ANN401 - tract has no types
    dtype, shape = describe(fact)
    return {"name": name, "dtype": dtype, "shape": shape}


def _empty(spec: dict[str, Any], lengths: dict[str, int]) -> np.ndarray:
    """Nothing of the past: symbolic lengths that nothing else has are 0."""
    return np.zeros([int(dim) if dim.isdigit() else lengths.get(dim, 0) for dim in spec["shape"]], spec["dtype"])


def _shape_of(value: Any) -> tuple[int, ...]:  # noqa: ANN401 - an array, or a tensor of tract
    return value.shape if isinstance(value, np.ndarray) else to_numpy(value).shape


def _answer(loaded: _Loaded | None, message: dict[str, Any], arrays: dict[str, np.ndarray]) -> Frame:
    if loaded is None:
        return {"error": "no archive is loaded"}, {}
    op = message["op"]
    if op == "run":
        return {}, loaded.run(arrays, message["outputs"])
    if op == "step":
        return {}, loaded.step(arrays, message["feedback"])
    if op == "crop":
        loaded.crop(message["names"], message["axis"], message["length"])
    elif op == "hold":
        loaded.hold(arrays)
    elif op == "take":
        loaded.take(message["names"], message["rows"])
    elif op == "reset":
        loaded.reset()
    else:
        return {"error": f"unknown operation {op!r}"}, {}
    return {}, {}


def _words_of(error: Exception) -> str:
    text = str(error).partition("Stack backtrace:")[0].strip()
    return text if isinstance(error, tract.TractError) else f"{type(error).__name__}: {text}"


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    loaded = None
    while (frame := read_frame(source)) is not None:
        message, arrays = frame
        answer: Frame
        try:
            if message["op"] == "load":
                loaded = _Loaded(message["path"], message["outputs"])
                answer = {"inputs": loaded.inputs, "outputs": loaded.outputs, "version": tract.version()}, {}
            else:
                answer = _answer(loaded, message, arrays)
        except Exception as error:  # noqa: BLE001 - whatever tract says goes to the runner, and the worker goes on
            answer = {"error": _words_of(error)}, {}
        write_frame(sink, *answer)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: in the middle of a long run nobody reads the pipe."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def main() -> None:
    """Serve frames from standard input to standard output."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints goes to the error stream, not between frames
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
