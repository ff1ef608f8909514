"""What a worker has seen of a conversation, so that only what is new is computed."""

from typing import Final, final

import numpy as np

from t2n_hf.tract.runner import TractRunner

__all__ = ["CACHE_IN", "CACHE_OUT", "IDS", "LOGITS", "MASK", "POSITIONS", "Past"]

IDS: Final = "input_ids"
LOGITS: Final = "outputs"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
CACHE_IN: Final = "in_cache_"
CACHE_OUT: Final = "out_cache_"
_CACHE_AXIS: Final = 2
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
        self._feedback = {
            name: name.replace(CACHE_OUT, CACHE_IN, 1) for name in runner.outputs if name.startswith(CACHE_OUT)
        }
        grows = [_grows(runner.inputs[name].shape) for name in self._feedback.values()]
        # A state of fixed size holds all that was seen, in one: it cannot be taken back to fewer tokens.
        self._can_be_cut = all(grows)
        self._sees_past = any(grows)
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
        kept = self._usable(tokens, mask)
        if kept == 0:
            self.reset()
        elif kept < self._tokens.shape[1]:
            self._runner.crop(self._feedback.values(), axis=_CACHE_AXIS, length=kept)
        # Forgotten while the worker is at it: an error leaves it in a state that nobody knows.
        self._forget()
        inputs = {IDS: tokens[:, kept:]}
        if MASK in self._runner.inputs:
            inputs[MASK] = mask if self._sees_past else mask[:, kept:]
        if POSITIONS in self._runner.inputs:
            inputs[POSITIONS] = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, kept:]
        result = self._runner.step(inputs, self._feedback)
        self._tokens, self._mask = tokens.copy(), mask.copy()
        return result[LOGITS]

    def _forget(self) -> None:
        self._tokens = self._mask = _NOTHING

    def _usable(self, tokens: np.ndarray, mask: np.ndarray) -> int:
        """How many of the seen positions begin `tokens`, short of its last."""
        if not self._feedback or len(self._tokens) != len(tokens):
            return 0
        seen = self._tokens.shape[1]
        most = min(seen, tokens.shape[1] - 1)
        changed = (self._tokens[:, :most] != tokens[:, :most]) | (self._mask[:, :most] != mask[:, :most])
        different = np.flatnonzero(changed.any(axis=0))
        kept = int(different[0]) if different.size else most
        if kept < seen and not self._can_be_cut:
            return 0
        # Keys on one side of a LongRoPE switch do not fit queries on the other.
        if self._switch is not None and (_longest(self._mask) > self._switch) != (_longest(mask) > self._switch):
            return 0
        return kept


def _grows(shape: tuple[int | str, ...]) -> bool:
    return len(shape) > _CACHE_AXIS and isinstance(shape[_CACHE_AXIS], str)


def _longest(mask: np.ndarray) -> int:
    return int(mask.sum(axis=1).max(initial=0))
