"""Run a model on a few texts and note how large the inputs of its weights are, channel by channel."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer

from t2n_hf.errors import ConfigError
from t2n_hf.hf.calibration.importance import Importance
from t2n_hf.hf.calibration.input_statistics import InputStatistics
from t2n_hf.hf.calibration.tokens import Texts, batches_of, windows_of
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.trace.swap import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WINDOW_TOKENS", "calibrate"]

WINDOW_TOKENS: Final = 512


def calibrate(
    model_or_path: "PreTrainedModel | str | Path",
    texts_or_token_ids: Texts,
    tokenizer: Any = None,  # noqa: ANN401 - a tokenizer of transformers
    *,
    max_tokens: int | None = None,
    window: int = WINDOW_TOKENS,
    batch_size: int = 1,
    source: str | None = None,
    **options: Any,  # noqa: ANN401 - for load_checkpoint
) -> Importance:
    """Measure the mean square of every input channel of the weights of linear layers, Conv1D, and fused experts.

    Quantizing with it (`T2NConfig(importance=...)`, `quantize_checkpoint(importance=...)`) puts the errors where they
    matter less. A few thousand tokens of text like what the model is for are enough.

    Args:
        model_or_path: a model, or a folder or an id of the Hub. That is loaded with its weights on disk: of them, only
            those of the module that runs are in memory.
        texts_or_token_ids: texts, or sequences of token ids; each is cut into windows that are run by themselves.
        tokenizer: for texts. None takes the one beside the model's path.
        max_tokens: stop after so many. None: all of them.
        window: tokens that are run at once; fewer where the model cannot see so many.
        batch_size: windows that are run side by side. Each batch reads the whole model from disk once; its activations
            are in memory.
        source: what the result calls the model. None: its id, or the last part of its path.
        **options: go to `load_checkpoint` (dtype, task, revision, trust_remote_code, max_memory...).

    The model is as it was afterwards, also when it is interrupted. Experts that hardly a token was routed to lean on
    the mean of all. Raises ConfigError for texts without a tokenizer, no tokens at all, ids that the model lacks, a
    model with encoder and decoder or not of text alone, or activations that overflow.
    """
    if isinstance(model_or_path, (str, Path)):
        options.setdefault("device_map", {"": "disk"})
        if tokenizer is None and _has_text(texts_or_token_ids):
            kept = {k: v for k, v in options.items() if k in ("revision", "token", "cache_dir", "trust_remote_code")}
            tokenizer = AutoTokenizer.from_pretrained(model_or_path, **{"trust_remote_code": False, **kept})
        model = load_checkpoint(model_or_path, **options)
    elif options:
        raise ConfigError(f"{', '.join(sorted(options))} say how to load a model, and it is loaded already")
    else:
        model = model_or_path
    _refuse_pairs(model)
    windows = list(windows_of(texts_or_token_ids, tokenizer, _reach(model, window), max_tokens))
    tokens = sum(len(ids) for ids in windows)
    if not tokens:
        raise ConfigError("there are no tokens to calibrate on; give texts, or token ids")
    _refuse_unknown(model, windows)
    statistics = InputStatistics(model)
    with _calibrating(model), statistics.collecting(), torch.inference_mode():
        _run(model, windows, batch_size, tokens)
    named = source or str(model_or_path if isinstance(model_or_path, (str, Path)) else model.config._name_or_path)
    return Importance(statistics.mean_squares(), source=_without_folder(named), tokens=tokens)


def _run(model: "PreTrainedModel", windows: list[torch.Tensor], batch_size: int, tokens: int) -> None:
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    # disable=None: nothing is shown where no one looks at a terminal.
    with tqdm(total=tokens, unit="token", desc="calibrating", disable=None, leave=False) as bar:
        for batch in batches_of(windows, batch_size):
            ids = batch.to(model.device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            bar.update(ids.numel())


@contextmanager
def _calibrating(model: "PreTrainedModel") -> Iterator[None]:
    """Have the model without dropout, and its experts computed one by one: then it shows which token goes to which."""
    experts = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    try:
        if experts is not None:
            model.set_experts_implementation("eager")
        with evaluating(model):
            yield
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)


def _has_text(texts: Texts) -> bool:
    return isinstance(texts, str) or (isinstance(texts, (list, tuple)) and bool(texts) and isinstance(texts[0], str))


def _refuse_pairs(model: "PreTrainedModel") -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"a {type(model).__name__} is no model of transformers; give one, or the path of a checkpoint"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} has an encoder and a decoder; only models of one of them are run")


def _reach(model: "PreTrainedModel", window: int) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(window, limit) if isinstance(limit, int) and limit > 0 else window


def _refuse_unknown(model: "PreTrainedModel", windows: Iterable[torch.Tensor]) -> None:
    known = _vocabulary(model)
    least, most = min(int(ids.min()) for ids in windows), max(int(ids.max()) for ids in windows)
    if least < 0 or most >= known:
        raise ConfigError(f"token ids {least} to {most} were given; the model has 0 to {known - 1}: wrong tokenizer?")


def _vocabulary(model: "PreTrainedModel") -> int:
    """Count the tokens that the model has embeddings for."""
    try:
        table: Any = model.get_input_embeddings()
    except NotImplementedError:  # it has several, or none
        table = None
    weight = getattr(table, "weight", None)
    if weight is None or weight.dim() != 2:
        raise ConfigError(f"{type(model).__name__} has no one table of token embeddings; only models of text are run")
    return int(weight.shape[0])


def _without_folder(name: str) -> str:
    """Give an id of the Hub as it is, and of a path the last part: a file that is passed on tells no folders."""
    is_id = name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists()
    return name if is_id else Path(name).name
