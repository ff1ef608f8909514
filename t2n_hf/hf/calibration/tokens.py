"""Texts, or token ids, as the windows that a model is calibrated on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from t2n_hf.errors import ConfigError

__all__ = ["Texts", "batches_of", "windows_of"]

Texts: TypeAlias = "str | Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor] | torch.Tensor"


def windows_of(texts: Texts, tokenizer: Any, length: int, max_tokens: int | None) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Give token ids, int64 (n,), n <= `length`, at most `max_tokens` in all. No window reaches over two texts.

    `tokenizer` may be None for token ids. Raises ConfigError for texts without one, and what is neither.
    """
    for name, value in (("window", length), ("max_tokens", max_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name}={value!r}; expected a number of tokens, 1 or more")
    left = max_tokens
    for window in _all_windows([texts] if isinstance(texts, str) else texts, tokenizer, length):
        kept = window if left is None else window[:left]
        if kept.numel():
            yield kept
        left = None if left is None else left - kept.numel()
        if left == 0:
            return


def _all_windows(texts: Iterable[Any], tokenizer: Any, length: int) -> Iterator[torch.Tensor]:  # noqa: ANN401
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ConfigError("texts need a tokenizer: give tokenizer=, or token ids")
            yield from map(torch.tensor, _tokenized(text, tokenizer, length))
            continue
        try:
            ids = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{type(text).__name__} is neither a text nor a sequence of token ids") from error
        if ids.dim() != 1 or (ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool)):
            raise ConfigError(f"token ids are whole numbers (n,), got {ids.dtype} {tuple(ids.shape)}")
        yield from ids.to(torch.int64).split(length)


def _tokenized(text: str, tokenizer: Any, length: int) -> list[list[int]]:  # noqa: ANN401
    """Cut a text into windows with the special tokens that the model expects around each."""
    if not text:
        return []
    if not getattr(tokenizer, "is_fast", False):  # only fast ones cut: the text is run without special tokens
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [ids[start : start + length] for start in range(0, len(ids), length)]
    found = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    return [ids for ids in found if ids]


def batches_of(windows: Sequence[torch.Tensor], batch_size: int) -> Iterator[torch.Tensor]:
    """Stack up to `batch_size` windows of one length, the longest first: (batch, n). Nothing is padded."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r}; expected a number of windows, 1 or more")
    by_length: dict[int, list[torch.Tensor]] = {}
    for window in windows:
        by_length.setdefault(window.numel(), []).append(window)
    for length in sorted(by_length, reverse=True):
        group = by_length[length]
        for start in range(0, len(group), batch_size):
            yield torch.stack(group[start : start + batch_size])
