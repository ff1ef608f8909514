"""How far quantized weights move a model: KL divergence per token, top-1 agreement, cosine distance of embeddings."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

TEXT = Path(__file__).resolve().parent.parent / "data" / "us-constitution.txt"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at",
    "To make bread, you need",
    "The quick brown fox",
    "In the year 1969,",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "A good name for a cat would be",
    "The largest planet in the solar system is",
    "Two plus two equals",
    "Shakespeare wrote",
    "The best way to learn a language is",
    "import numpy as np\n",
    "My favourite season is",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
    "The meaning of life is",
)


def windows(tokenizer: Callable, length: int = 512, least: int = 4000) -> list[torch.Tensor]:
    """The fixed text as windows of `length` tokens, (1, length) i64 each, `least` tokens or more in all."""
    ids = tokenizer(TEXT.read_text(), return_tensors="pt", add_special_tokens=False)["input_ids"]
    count = -(-least // length)
    if ids.shape[1] < count * length:
        raise ValueError(f"{TEXT} holds {ids.shape[1]} tokens, {count * length} needed")
    return [ids[:, i * length : (i + 1) * length] for i in range(count)]


@torch.inference_mode()
def logits_of(model: nn.Module, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
    """Logits (tokens, vocabulary) in f32. `chunk` feeds so many tokens at a time, with a cache, as generation does."""
    if chunk is None:
        return model(ids).logits[0].float()
    past, parts = None, []
    for piece in ids.split(chunk, dim=1):
        out = model(piece, cache=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits[0].float())
    return torch.cat(parts)


def compare(
    reference: nn.Module, other: nn.Module, texts: list[torch.Tensor], chunk: int | None = None
) -> dict[str, float]:
    """Mean KL(reference || other) in nats per token, and how often both put the same token first."""
    kl, same, tokens = 0.0, 0, 0
    for ids in texts:
        p = logits_of(reference, ids, chunk).log_softmax(-1)
        q = logits_of(other, ids, chunk).log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += ids.shape[1]
    return {"kl": kl / tokens, "top1": same / tokens, "tokens": tokens}


@torch.inference_mode()
def sentence_embeddings(model: nn.Module, tokenizer: Callable, sentences: list[str]) -> torch.Tensor:
    """Mean-pooled, normalised embeddings (sentences, hidden), as all-MiniLM-L6-v2 is used."""
    rows = []
    for sentence in sentences:
        batch = tokenizer(sentence, return_tensors="pt", truncation=True, max_length=128)
        rows.append(model(**batch).last_hidden_state[0].mean(0))
    return nn.functional.normalize(torch.stack(rows).float(), dim=-1)


def cosine_distance(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean of 1 - cos over rows."""
    return float((1 - (reference * other).sum(-1)).mean())


def sentences() -> list[str]:
    """The fixed text, paragraph by paragraph."""
    return [" ".join(block.split()) for block in TEXT.read_text().split("\n\n") if len(block.split()) > 8]
