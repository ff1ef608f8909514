"""A language model that reads images or sounds, in tract: three archives, and the positions seen so far."""

from collections.abc import Mapping
from types import TracebackType
from typing import Final, final

import numpy as np

from t2n_hf.errors import ConfigError
from t2n_hf.tract.caches import WorkerCaches, common_length
from t2n_hf.tract.encoder_decoder import Encoded
from t2n_hf.tract.runner import TractRunner

__all__ = ["Multimodal"]

_IDS: Final = "input_ids"
_EMBEDDINGS: Final = "inputs_embeds"


@final
class Multimodal:
    """Runs the archives that make features, embed and decode. A context manager; closing it ends the workers.

    Args:
        encoder: an image or a sound to features [F, width].
        embedding: tokens and features to embeddings [1, S, width].
        decoder: embeddings to logits, with caches.
        placeholder: the token that stands for one feature.

    Raises ConfigError for archives that do not fit together.
    """

    def __init__(self, encoder: TractRunner, embedding: TractRunner, decoder: TractRunner, placeholder: int) -> None:
        self.encoder = encoder
        self.embedding = embedding
        self.decoder = decoder
        self.placeholder = placeholder
        (self._features,) = encoder.outputs
        if self._features not in embedding.inputs or _EMBEDDINGS not in decoder.inputs:
            raise ConfigError(
                f"{embedding.archive} takes {', '.join(embedding.inputs)}; expected {self._features}, which "
                f"{encoder.archive} gives, and a decoder that takes {_EMBEDDINGS}"
            )
        self._caches = WorkerCaches(decoder)
        self._encoded: Encoded | None = None
        self._seen = np.zeros((1, 0), np.int64)

    def encode(self, inputs: Mapping[str, np.ndarray]) -> Encoded:
        """Make features of images or sounds [I, ...], one after the other. Raises TractError."""
        ((name, values),) = inputs.items()
        each = [self.encoder.run({name: values[at : at + 1]})[self._features] for at in range(len(values))]
        features = np.concatenate(each)
        return Encoded(states=features, held={self._features: features})

    def nothing(self) -> Encoded:
        """What stands for no image at all."""
        spec = self.embedding.inputs[self._features]
        empty = np.zeros((0, int(spec.shape[-1])), spec.dtype)
        return Encoded(states=empty, held={self._features: empty})

    def logits(self, encoded: Encoded, tokens: np.ndarray) -> np.ndarray:
        """Logits after `tokens` [1, T] i64, of the last position [1, 1, V] (of each new one, in an archive of all).

        Positions that the worker has seen with these features are not computed again. Raises ConfigError when
        placeholders and features differ in number.
        """
        features = encoded.held[self._features]
        stands = tokens[0] == self.placeholder
        if int(stands.sum()) != len(features):
            raise ConfigError(
                f"{int(stands.sum())} placeholders (token {self.placeholder}) for {len(features)} features; the "
                "processor of the model writes as many as an image has"
            )
        kept = self._reuse(encoded, tokens)
        self._seen = self._seen[:, :0]  # while the workers are at it: an error leaves them in a state that nobody knows
        new = {_IDS: np.ascontiguousarray(tokens[:, kept:]), self._features: features[int(stands[:kept].sum()) :]}
        embeddings = self.embedding.run(new)[_EMBEDDINGS]
        logits = self._caches.step({_EMBEDDINGS: embeddings})
        self._seen, self._encoded = tokens.copy(), encoded
        return logits

    def _reuse(self, encoded: Encoded, tokens: np.ndarray) -> int:
        kept = common_length(self._seen, tokens)
        if encoded is not self._encoded:
            # What stands before the first placeholder is the same with any image.
            first = np.flatnonzero(tokens[0] == self.placeholder)
            kept = min(kept, int(first[0])) if first.size else kept
        return self._caches.cut(kept, self._seen.shape[1])

    def reset(self) -> None:
        """Forget the tokens: the next call computes all of them."""
        self._seen = self._seen[:, :0]
        self.decoder.reset()

    def close(self) -> None:
        """End the workers."""
        for runner in (self.encoder, self.embedding, self.decoder):
            runner.close()

    def __enter__(self) -> "Multimodal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
