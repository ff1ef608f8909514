"""Models of several archives in tract: which class runs them, by the names of their parts."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from t2n_hf.errors import ConfigError
from t2n_hf.tract.encoder_decoder import EncoderDecoder
from t2n_hf.tract.multimodal import Multimodal
from t2n_hf.tract.runner import TractRunner

__all__ = ["open_encoder_decoder", "open_multimodal"]

_ENCODERS: Final = ("vision", "audio")


def open_encoder_decoder(archives: Mapping[str, Path], *, timeout_s: float | None = None) -> EncoderDecoder:
    """Load the archives of an encoder-decoder model, by the names of its parts.

    Raises ConfigError for other parts, TractError as `TractRunner` does.
    """
    if set(archives) != {"encoder", "decoder"}:
        raise ConfigError(f"an encoder-decoder model has the parts encoder and decoder, got {', '.join(archives)}")
    with ExitStack() as opened:
        runners = _open(archives, opened, timeout_s)
        pipeline = EncoderDecoder(runners["encoder"], runners["decoder"])
        opened.pop_all()
    return pipeline


def open_multimodal(archives: Mapping[str, Path], placeholder: int, *, timeout_s: float | None = None) -> Multimodal:
    """Load the archives of a model that reads images or sounds; `placeholder` is the token that stands for a feature.

    Raises ConfigError for other parts, TractError as `TractRunner` does.
    """
    first = next((name for name in _ENCODERS if name in archives), None)
    if first is None or set(archives) != {first, "embedding", "decoder"}:
        raise ConfigError(
            f"a model of images or sounds has the parts vision (or audio), embedding and decoder, got "
            f"{', '.join(archives)}"
        )
    with ExitStack() as opened:
        runners = _open(archives, opened, timeout_s)
        pipeline = Multimodal(runners[first], runners["embedding"], runners["decoder"], placeholder)
        opened.pop_all()
    return pipeline


def _open(archives: Mapping[str, Path], opened: ExitStack, timeout_s: float | None) -> dict[str, TractRunner]:
    return {name: opened.enter_context(TractRunner(path, timeout_s=timeout_s)) for name, path in archives.items()}
