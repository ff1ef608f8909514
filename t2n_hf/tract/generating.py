"""What all models have in common that tract runs and transformers' `generate()` drives."""

from abc import abstractmethod
from types import TracebackType
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.utils import logging
from typing_extensions import Self

from t2n_hf.errors import ConfigError
from t2n_hf.tract.past import LOGITS
from t2n_hf.tract.runner import TractRunner

__all__ = ["TractGenerator", "refuse_unknown_tokens"]

logger = logging.get_logger(__name__)


class TractGenerator(GenerationMixin):
    """A model whose `decoder` runs in a worker process, which has the caches. Close it, or use it as a context manager.

    A subclass says which modes of generation it has, and defines `forward` and `close`.
    """

    # What transformers asks of a model that generates.
    base_model_prefix: ClassVar[str] = ""
    _is_stateful: ClassVar[bool] = True
    _supported_generation_modes: ClassVar[list[str]] = []

    def __init__(
        self,
        decoder: TractRunner,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        max_context: int | None,
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.max_context = max_context
        self._decoder = decoder

    @property
    def device(self) -> torch.device:
        """Where inputs and logits are: tract computes on the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the logits."""
        return getattr(torch, self._decoder.outputs[LOGITS].dtype)

    def can_generate(self) -> bool:
        """Always: that is what this class is for."""
        return True

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the model takes and gives
        """Logits after a whole sequence."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `forward`
        """Run `forward`."""
        return self.forward(*args, **kwargs)

    @abstractmethod
    def close(self) -> None:
        """End the worker processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_experts_implementation(self) -> dict[str, str | None]:
        """Nothing to switch: the archive has its own."""
        return {}

    @property
    def _vocabulary(self) -> int | None:
        return getattr(self.config.get_text_config(decoder=True), "vocab_size", None)

    def _check_length(self, length: int) -> None:
        if self.max_context is not None and length > self.max_context:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than the {self.max_context} that {self._decoder.archive} "
                "was exported for; shorten it, or export with a larger max_context if the model has one"
            )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the worker has the cache

    def _validate_generation_mode(self, generation_mode: Any, *others: Any) -> None:  # noqa: ANN401
        if generation_mode not in self._supported_generation_modes:
            known = ", ".join(str(getattr(mode, "value", mode)) for mode in self._supported_generation_modes)
            raise ConfigError(
                f"generation mode {generation_mode.value!r} is not supported by {type(self).__name__}, which has "
                f"{known}: use num_beams=1 and no assistant, or another of these modes"
            )
        super()._validate_generation_mode(generation_mode, *others)  # type: ignore[misc]

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        self._check_length(input_ids_length)
        # The last token is only predicted, so it needs no position.
        longest = None if self.max_context is None else self.max_context + 1
        if longest is not None and generation_config.max_length > longest:
            logger.warning_once(f"generation ends at {longest} tokens, the context that the archive was exported for")
            generation_config.max_length = longest
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)  # type: ignore[misc]


def refuse_unknown_tokens(name: str, tokens: torch.Tensor, vocabulary: int | None) -> None:
    """Raise ConfigError for tokens that the model lacks, or none at all: tract would end the worker."""
    if tokens.numel() == 0:
        raise ConfigError(f"{name} is empty: an archive needs one token at the least")
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise ConfigError(f"{name} holds {low if low < 0 else high}; expected tokens from 0 to below {vocabulary}")
