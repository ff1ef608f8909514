"""What a worker has seen of a conversation, so that only what is new is computed."""

from typing import Final, final

import numpy as np

from t2n_hf.tract.caches import WorkerCaches
from t2n_hf.tract.runner import TractRunner

__all__ = ["IDS", "LOGITS", "MASK", "POSITIONS", "Past"]

IDS: Final = "input_ids"
LOGITS: Final = "outputs"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
_NOTHING: Final = np.zeros((0, 0), np.int64)


@final
class Past:
    """The tokens whose keys, values and states the worker holds.

    Args:
        runner: an archive of a causal language model.
        switch: length up to which a LongRoPE model uses its short factors; None for other models.
    """

    def __init__(self, runner: TractRunner, *, switch: int | None) -> None:
        self._runner = runner
        self._switch = switch
        self._caches = WorkerCaches(runner)
        self._tokens: np.ndarray = _NOTHING
        self._mask: np.ndarray = _NOTHING

    def reset(self) -> None:
        """Forget everything."""
        self._forget()
        self._runner.reset()

    def advance(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Make `tokens` [B, S] the past, computing what is new in it, the last token at the least. Returns the logits.

        `mask` [B, S] is 0 where a token is padding; it must be all ones for an archive that takes no mask.
        """
        kept = self._caches.cut(self._usable(tokens, mask), self._tokens.shape[1])
        # Forgotten while the worker is at it: an error leaves it in a state that nobody knows.
        self._forget()
        inputs = {IDS: tokens[:, kept:]}
        if MASK in self._runner.inputs:
            inputs[MASK] = mask if self._caches.sees_past else mask[:, kept:]
        if POSITIONS in self._runner.inputs:
            inputs[POSITIONS] = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, kept:]
        logits = self._caches.step(inputs)
        self._tokens, self._mask = tokens.copy(), mask.copy()
        return logits

    def _forget(self) -> None:
        self._tokens = self._mask = _NOTHING

    def _usable(self, tokens: np.ndarray, mask: np.ndarray) -> int:
        """How many of the seen positions begin `tokens`, short of its last."""
        if len(self._tokens) != len(tokens):
            return 0
        most = min(self._tokens.shape[1], tokens.shape[1] - 1)
        changed = (self._tokens[:, :most] != tokens[:, :most]) | (self._mask[:, :most] != mask[:, :most])
        different = np.flatnonzero(changed.any(axis=0))
        kept = int(different[0]) if different.size else most
        # Keys on one side of a LongRoPE switch do not fit queries on the other.
        if self._switch is not None and (_longest(self._mask) > self._switch) != (_longest(mask) > self._switch):
            return 0
        return kept


def _longest(mask: np.ndarray) -> int:
    return int(mask.sum(axis=1).max(initial=0))
