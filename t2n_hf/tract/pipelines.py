"""Models of several archives in tract: which class runs them, by the names of their parts."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from t2n_hf.errors import ConfigError
from t2n_hf.tract.encoder_decoder import EncoderDecoder
from t2n_hf.tract.runner import TractRunner

__all__ = ["open_pipeline"]


def open_pipeline(archives: Mapping[str, Path], *, timeout_s: float | None = None) -> EncoderDecoder:
    """Load the archives of a pipeline, by the names of its parts.

    Raises ConfigError for parts that nothing here runs, TractError as `TractRunner` does.
    """
    if set(archives) != {"encoder", "decoder"}:
        raise ConfigError(f"nothing here runs the parts {', '.join(archives)} together; expected encoder, decoder")
    with ExitStack() as opened:
        runners = {
            name: opened.enter_context(TractRunner(path, timeout_s=timeout_s)) for name, path in archives.items()
        }
        pipeline = EncoderDecoder(runners["encoder"], runners["decoder"])
        opened.pop_all()
    return pipeline
