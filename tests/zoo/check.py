"""Export a model of the zoo and hold the archive against PyTorch, at sizes that were not traced.

The truth is the model itself as transformers runs it: no cache of ours, no setting of ours. A decoder is compared with
one run over the whole text without any cache, so that the archive's own past is what is tested.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError, MissingEmittersError, TractError
from t2n_hf.tract.runner import TractRunner
from zoo.encoder_decoders import padded
from zoo.entry import VOCABULARY, Encoder, Entry, Generator, PlainModule, token_ids
from zoo.reasons import FIXED

__all__ = ["SETTINGS", "TOLERANCE", "Outcome", "check"]

TOLERANCE: Final = 1e-4
# Changing what a model must see changes its result by this at the least, relative; else a wrong mask would not show.
_VISIBLE: Final = 1e-3
_TIMEOUT_S: Final = 240.0
_HEAD: Final = 300
# Past, then new tokens: each past is made by the archive itself, from nothing.
_STEPS: Final = ((9, 1), (20, 1), (0, 6), (7, 4))
_TEXTS: Final = ((1, 9), (3, 14), (4, 9))
# Options of export_nnef under which the zoo must give the same results.
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "flat": {"flat": True},
    "whole": {"capture": "whole"},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one model.

    `status` is "right", "fixed" (right, at the shapes of the example only, as nothing else can be captured), "wrong"
    (the archive runs and differs), "emitters" (operators without one), "capture", "tract" (it refuses the archive) or
    "failed"; `error` is the largest difference relative to the largest value.
    """

    name: str
    family: str
    status: str
    error: float | None = None
    note: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _WrongResult(Exception):
    def __init__(self, text: str, error: float | None = None) -> None:
        super().__init__(text)
        self.error = error


class _PlainResults(nn.Module):
    """A model whose result is a dictionary of some of its outputs."""

    def __init__(self, subject: PlainModule) -> None:
        super().__init__()
        self.model = subject.model
        self._outputs, self._options = subject.outputs, dict(subject.options)

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.model(**inputs, **self._options, return_dict=True)
        return {name: result[name] for name in self._outputs}


def check(entry: Entry, setting: str = "default") -> Outcome:
    """Build, export and compare one model; nothing is raised but for faults of the zoo itself."""
    start = time.perf_counter()
    subject = entry.make()
    with tempfile.TemporaryDirectory() as folder:
        status, error, note = "right", None, ""
        try:
            options = {**SETTINGS[setting], **({"capture": "dispatch"} if entry.name in FIXED else {})}
            error, fixed = _compared(subject, Path(folder), options)
            status = "fixed" if fixed else "right"
        except _WrongResult as reason:
            status, error, note = "wrong", reason.error, str(reason)
        except MissingEmittersError as reason:
            status, note = "emitters", _missing(str(reason))
        except CaptureError as reason:
            status, note = "capture", _one_line(str(reason))
        except TractError as reason:
            status, note = "tract", _one_line(str(reason))
        except Exception as reason:  # noqa: BLE001 - the table says what came of it
            status, note = "failed", _one_line(f"{type(reason).__name__}: {reason}")
    seconds = time.perf_counter() - start
    return Outcome(name=entry.name, family=entry.family, status=status, error=error, note=note, seconds=seconds)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 2 * _HEAD else f"{line[:_HEAD]} ... {line[-_HEAD:]}"


def _missing(text: str) -> str:
    """The operators that an error lists, each once."""
    return ", ".join(dict.fromkeys(line.strip() for line in text.splitlines()[1:] if not line.startswith("    ")))


def _compared(
    subject: Generator | Encoder | PlainModule, folder: Path, options: Mapping[str, Any]
) -> tuple[float, bool]:
    """The largest error, and whether the archive takes the shapes of its example only."""
    target, checked = folder / "export", False  # the exporter's own check is no independent truth
    options = {"check": checked, "format": "dir", **options}
    if isinstance(subject, Generator):
        export_nnef(subject.model, target, all_logits=True, **subject.options, **options)
        rounds = _generated
    elif isinstance(subject, Encoder):
        export_nnef(subject.model, target, **subject.options, **options)
        rounds = _encoded
    else:
        _export_plain(subject, target, options)
        rounds = _called
    worst = 0.0
    with TractRunner(target / "model", timeout_s=_TIMEOUT_S) as runner:
        for where, got, expected in rounds(subject, runner):
            worst = max(worst, _difference(where, got, expected))
        return worst, _is_fixed(runner)


def _is_fixed(runner: TractRunner) -> bool:
    return all(isinstance(length, int) for spec in runner.inputs.values() for length in spec.shape)


def _difference(where: str, got: np.ndarray, expected: torch.Tensor) -> float:
    truth = expected.detach().numpy()
    if got.shape != truth.shape:
        raise _WrongResult(f"{where}: shape {list(got.shape)} for {list(truth.shape)}")
    if not np.isfinite(truth).all():
        raise ValueError(f"{where}: PyTorch itself gives values that are not finite")
    scale = max(float(np.abs(truth).max(initial=0.0)), 1e-30)
    error = float(np.abs(got.astype(np.float64) - truth).max(initial=0.0)) / scale
    if not error <= TOLERANCE:
        raise _WrongResult(f"{where}: differs by {error:.2g} of the largest value {scale:.3g}", error)
    return error


def _require_visible(what: str, result: torch.Tensor, changed: torch.Tensor) -> None:
    """Refuse a model of the zoo that does not show what it is there to show."""
    difference = float((result - changed).abs().max() / result.abs().max())
    if difference < _VISIBLE:
        raise ValueError(f"{what} changes the result by {difference:.2g} only; scale the weights up")


Round = tuple[str, np.ndarray, torch.Tensor]


def _generated(subject: Generator, runner: TractRunner) -> Iterator[Round]:
    feedback = {f"out_{name[3:]}": name for name in runner.inputs if name.startswith("in_")}
    ids = token_ids(1, 21, subject.model.config.get_text_config().vocab_size)
    with torch.no_grad():
        truth = subject.model(input_ids=ids, use_cache=False).logits
        changed = ids.clone()
        changed[:, -5] = (changed[:, -5] + 1) % VOCABULARY
        _require_visible(
            "an earlier token", truth[:, -1], subject.model(input_ids=changed, use_cache=False).logits[:, -1]
        )
    for past, new in _STEPS:
        runner.reset()
        begin = 0
        for end in (past, past + new) if past else (new,):
            for first, last in [(0, end)] if subject.without_past else _chunks(runner, begin, end):
                step = {"input_ids": ids[:, first:last].numpy()}
                got = runner.step(step, feedback)["outputs"]
                yield f"S={last - first}, P={first}", got, truth[:, first:last]
            begin = end


def _chunks(runner: TractRunner, begin: int, end: int) -> list[tuple[int, int]]:
    """Calls that take the tokens from `begin` to `end`: one, or one each when the archive takes one at a time."""
    if begin == end:
        return []
    if runner.inputs["input_ids"].shape[1] == 1:
        return [(at, at + 1) for at in range(begin, end)]
    return [(begin, end)]


def _encoded(subject: Encoder, runner: TractRunner) -> Iterator[Round]:
    has_mask = "attention_mask" in signature(subject.model.forward).parameters
    for batch, length in [runner.inputs["input_ids"].shape] if _is_fixed(runner) else _TEXTS:
        mask = padded(batch, length) if has_mask else torch.ones(batch, length)
        given = {"input_ids": token_ids(batch, length), **({"attention_mask": mask} if has_mask else {})}
        if "token_type_ids" in runner.inputs:
            given["token_type_ids"] = (torch.arange(length) > length // 2).long().expand(batch, length).contiguous()
        with torch.no_grad():
            truth = subject.model(**given)[subject.output]
            if batch > 1 and has_mask:
                unmasked = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
                _require_visible("the padding mask", truth[1:, :1], subject.model(**unmasked)[subject.output][1:, :1])
        got = runner.run({name: value.numpy() for name, value in given.items()})[subject.output]
        if truth.shape[:2] == (batch, length):
            # Nobody reads what comes out at padding, where attention of a window sees nothing at all.
            seen = mask.bool()
            got, truth = got[seen.numpy()], truth[seen]
        yield f"B={batch}, S={length}", got, truth


def _export_plain(subject: PlainModule, target: Path, options: Mapping[str, Any]) -> None:
    export_nnef(
        _PlainResults(subject),
        target,
        example_kwargs=subject.inputs(subject.traced),
        dynamic_shapes=_dims(subject),
        input_names=list(subject.inputs(subject.traced)),
        output_names=list(subject.outputs),
        **options,
    )


def _dims(subject: PlainModule) -> dict[str, dict[int, Any] | None]:
    symbols = {name for axes in subject.axes.values() for name in axes.values()}
    dims = {
        name: torch.export.Dim(name, min=subject.least.get(name, 1), max=subject.most.get(name)) for name in symbols
    }
    names = subject.inputs(subject.traced)
    return {name: {axis: dims[s] for axis, s in subject.axes.get(name, {}).items()} or None for name in names}


def _called(subject: PlainModule, runner: TractRunner) -> Iterator[Round]:
    module = _PlainResults(subject)
    for sizes in [subject.traced] if _is_fixed(runner) else [*subject.tested, subject.traced]:
        given = subject.inputs(sizes)
        with torch.no_grad():
            truth = module(**given)
        got = runner.run({name: value.numpy() for name, value in given.items()})
        where = ", ".join(f"{name}={value}" for name, value in sizes.items())
        for name in subject.outputs:
            yield f"{name} at {where}", got[name], truth[name]
