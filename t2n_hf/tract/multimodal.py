"""A language model that reads images or sounds, in tract: three archives, and the positions seen so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, final

import numpy as np

from t2n_hf.errors import ConfigError
from t2n_hf.tract.caches import WorkerCaches, common_length
from t2n_hf.tract.runner import TractRunner
from t2n_hf.tract.three_positions import three_positions

__all__ = ["Features", "Multimodal"]

_IDS: Final = "input_ids"
_EMBEDDINGS: Final = "inputs_embeds"
_POSITIONS: Final = "position_ids"
_GRID_RANK: Final = 4


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the encoder gave for the images of a conversation: `held` [F, width], by the names of its outputs.

    `grids` are the (height, width) in features of each, for models that count positions in them.
    """

    held: Mapping[str, np.ndarray]
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Number of features."""
        return len(next(iter(self.held.values())))


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
        missing = [name for name in encoder.outputs if name not in embedding.inputs]
        if missing or _EMBEDDINGS not in decoder.inputs:
            raise ConfigError(
                f"{embedding.archive} takes {', '.join(embedding.inputs)}; expected {', '.join(encoder.outputs)}, "
                f"which {encoder.archive} gives, and a decoder that takes {_EMBEDDINGS}"
            )
        self._caches = WorkerCaches(decoder)
        self._features: Features | None = None
        self._seen = np.zeros((1, 0), np.int64)

    @property
    def takes_grids(self) -> bool:
        """Whether the encoder takes a picture as patches [H, W, M*M, values], of any height and width."""
        ((_, spec),) = self.encoder.inputs.items()
        return len(spec.shape) == _GRID_RANK and all(isinstance(length, str) for length in spec.shape[:2])

    def encode(self, images: Sequence[Mapping[str, np.ndarray]]) -> Features:
        """Make features of images or sounds, each what the encoder takes. Raises TractError."""
        each = [self.encoder.run(image) for image in images]
        held = {name: np.concatenate([outputs[name] for outputs in each]) for name in self.encoder.outputs}
        shapes = [next(iter(image.values())).shape for image in images]
        grids = tuple((int(shape[0]), int(shape[1])) for shape in shapes) if self.takes_grids else ()
        return Features(held=held, grids=grids)

    def nothing(self) -> Features:
        """What stands for no image at all."""
        specs = {name: self.embedding.inputs[name] for name in self.encoder.outputs}
        return Features(held={name: np.zeros((0, int(spec.shape[-1])), spec.dtype) for name, spec in specs.items()})

    def logits(self, features: Features, tokens: np.ndarray) -> np.ndarray:
        """Logits after `tokens` [1, T] i64, of the last position [1, 1, V] (of each new one, in an archive of all).

        Positions that the worker has seen with these features are not computed again. Raises ConfigError when
        placeholders and features differ in number.
        """
        stands = tokens[0] == self.placeholder
        if int(stands.sum()) != features.count:
            raise ConfigError(
                f"{int(stands.sum())} placeholders (token {self.placeholder}) for {features.count} features; the "
                "processor of the model writes as many as an image has"
            )
        more = {}
        if _POSITIONS in self.decoder.inputs:
            more[_POSITIONS] = three_positions(tokens, self.placeholder, features.grids)
        kept = self._reuse(features, tokens)
        self._seen = self._seen[:, :0]  # while the workers are at it: an error leaves them in a state that nobody knows
        used = int(stands[:kept].sum())
        given = {name: value[used:] for name, value in features.held.items()}
        embedded = self.embedding.run({_IDS: np.ascontiguousarray(tokens[:, kept:]), **given})
        positions = {name: np.ascontiguousarray(value[:, :, kept:]) for name, value in more.items()}
        logits = self._caches.step({**embedded, **positions})
        self._seen, self._features = tokens.copy(), features
        return logits

    def _reuse(self, features: Features, tokens: np.ndarray) -> int:
        kept = common_length(self._seen, tokens)
        stands = tokens[0] == self.placeholder
        if features is not self._features:
            # What stands before the first placeholder is the same with any image.
            first = np.flatnonzero(stands)
            kept = min(kept, int(first[0])) if first.size else kept
        while 0 < kept < len(stands) and stands[kept - 1] and stands[kept]:
            kept -= 1  # the tokens of an image may see each other: they stay together
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
