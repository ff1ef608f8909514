"""The caches that a decoder's worker keeps: which output becomes which input, and how they are taken back."""

from collections.abc import Mapping
from typing import Final, final

import numpy as np

from t2n_hf.tract.runner import TractRunner

__all__ = ["WorkerCaches", "common_length"]

_IN: Final = "in_cache_"
_OUT: Final = "out_cache_"
_LENGTH_AXIS: Final = 2


@final
class WorkerCaches:
    """Keys, values and states of one decoder, by the names of its archive.

    `feedback` says which input each `out_cache_*` becomes. `sees_past` is whether some cache grows with the text.
    """

    def __init__(self, decoder: TractRunner) -> None:
        self._decoder = decoder
        self.feedback: Mapping[str, str] = {
            name: name.replace(_OUT, _IN, 1) for name in decoder.outputs if name.startswith(_OUT)
        }
        grows = [_grows(decoder.inputs[name].shape) for name in self.feedback.values()]
        # A state of fixed size holds all that was seen, in one: it cannot be taken back to fewer tokens.
        self._can_be_cut = all(grows)
        self.sees_past = any(grows)

    def cut(self, kept: int, seen: int) -> int:
        """Take the caches back from `seen` positions to `kept`; returns how many are left, 0 if they cannot be cut."""
        if not self.feedback or (kept < seen and not self._can_be_cut):
            kept = 0
        if kept == 0:
            self._decoder.reset()
        elif kept < seen:
            self._decoder.crop(self.feedback.values(), axis=_LENGTH_AXIS, length=kept)
        return kept

    def step(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the decoder, whose caches go on; returns the logits. Raises TractError."""
        result = self._decoder.step(inputs, self.feedback)
        return next(value for name, value in result.items() if name not in self.feedback)

    def take(self, rows: list[int]) -> None:
        """Let the caches be those of these rows, in this order."""
        self._decoder.take([*self.feedback.values()], rows)


def common_length(seen: np.ndarray, tokens: np.ndarray) -> int:
    """How many positions all rows of `tokens` [B, T] share with `seen` [B, P], short of their last."""
    most = min(seen.shape[1], tokens.shape[1] - 1)
    different = np.flatnonzero((seen[:, :most] != tokens[:, :most]).any(axis=0))
    return int(different[0]) if different.size else most


def _grows(shape: tuple[int | str, ...]) -> bool:
    return len(shape) > _LENGTH_AXIS and isinstance(shape[_LENGTH_AXIS], str)
