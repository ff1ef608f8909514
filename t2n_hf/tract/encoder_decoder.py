"""An encoder and a decoder in tract, each in a worker of its own: what was encoded, and the tokens seen so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, final

import numpy as np

from t2n_hf.errors import ConfigError
from t2n_hf.tract.caches import WorkerCaches, common_length
from t2n_hf.tract.runner import TractRunner

__all__ = ["Encoded", "EncoderDecoder"]

_CROSS: Final = "cross_"
_MASK: Final = "encoder_attention_mask"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What the encoder gave: `states` [B, E, width], and what the decoder takes of it, by the name of the input."""

    states: np.ndarray
    held: Mapping[str, np.ndarray]


@final
class EncoderDecoder:
    """Runs the two archives of an encoder-decoder model. A context manager; closing it ends both workers.

    Raises ConfigError for archives that do not fit together.
    """

    def __init__(self, encoder: TractRunner, decoder: TractRunner) -> None:
        self.encoder = encoder
        self.decoder = decoder
        taken = [name for name in decoder.inputs if name.startswith(_CROSS)]
        missing = [name for name in taken if name not in encoder.outputs]
        if missing or not taken:
            raise ConfigError(
                f"{decoder.archive} takes {', '.join(missing) or 'nothing'} of what {encoder.archive} gives; expected "
                f"inputs {_CROSS}* that are outputs of the encoder"
            )
        self._taken = taken
        self._caches = WorkerCaches(decoder)
        self._encoded: Encoded | None = None
        self._rows = np.zeros(0, np.int64)
        self._seen = np.zeros((0, 0), np.int64)

    @property
    def masked(self) -> bool:
        """Whether the encoder takes a mask."""
        return _MASK in self.decoder.inputs

    def encode(self, inputs: Mapping[str, np.ndarray]) -> Encoded:
        """Run the encoder on its inputs by name. Raises TractError."""
        outputs = self.encoder.run(inputs)
        held = {name: outputs[name] for name in self._taken}
        if self.masked:
            held[_MASK] = inputs["attention_mask"]
        states = next(value for name, value in outputs.items() if name not in held)
        return Encoded(states=states, held=held)

    def logits(self, encoded: Encoded, tokens: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Logits after `tokens` [R, T] i64, of the last position [R, 1, V] (of each new one, in an archive of all).

        `rows` [R] says which row of `encoded` each sequence belongs to; None: one each. Positions that the worker has
        seen, in any order of the sequences, are not computed again.
        """
        rows = np.arange(len(tokens)) if rows is None else rows
        kept = self._reuse(encoded, tokens, rows)
        self._seen = self._seen[:0]  # while the worker is at it: an error leaves it in a state that nobody knows
        logits = self._caches.step({"input_ids": np.ascontiguousarray(tokens[:, kept:])})
        self._seen = tokens.copy()
        return logits

    def _reuse(self, encoded: Encoded, tokens: np.ndarray, rows: np.ndarray) -> int:
        """Bring the worker's caches to a beginning of `tokens`; returns how long it is."""
        if encoded is not self._encoded:
            self.decoder.hold(encoded.held)
            self._encoded, self._rows = encoded, np.arange(len(encoded.states))
            self._seen = self._seen[:0]
        order = self._order(tokens, rows)
        if order is None:
            self.decoder.reset()
            if not np.array_equal(rows, self._rows):
                self.decoder.hold({name: value[rows] for name, value in encoded.held.items()})
                self._rows = rows.copy()
            return 0
        if not np.array_equal(order, np.arange(len(order))):
            self._caches.take(order.tolist())
            self._seen = self._seen[order]
        return self._caches.cut(common_length(self._seen, tokens), self._seen.shape[1])

    def _order(self, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
        """For each sequence a seen one that it begins like; None when nothing can be used again."""
        if not self._caches.feedback or self._seen.size == 0 or not np.array_equal(rows, self._rows):
            return None
        if common_length(self._seen, tokens) == min(self._seen.shape[1], tokens.shape[1] - 1):
            return np.arange(len(rows))
        length = min(self._seen.shape[1], tokens.shape[1] - 1)
        begins = {
            (int(row), *seen[:length].tolist()): at for at, (row, seen) in enumerate(zip(rows, self._seen, strict=True))
        }
        order = [begins.get((int(row), *new[:length].tolist())) for row, new in zip(rows, tokens, strict=True)]
        if any(at is None for at in order):
            return np.arange(len(rows)) if common_length(self._seen, tokens) else None
        return np.array(order)

    def reset(self) -> None:
        """Forget the tokens: the next call computes all of them."""
        self._seen = self._seen[:0]
        self.decoder.reset()

    def close(self) -> None:
        """End both workers."""
        self.encoder.close()
        self.decoder.close()

    def __enter__(self) -> "EncoderDecoder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
