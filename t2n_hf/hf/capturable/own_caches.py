"""Decoders whose state is not in a cache of transformers' common kind: what they keep, and how a `StateCache` is it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedModel

from t2n_hf.hf.caches.states import LayerStates, StateCache
from t2n_hf.hf.caches.whole import cache_parameter
from t2n_hf.hf.capturable.lightning import minimax_states
from t2n_hf.hf.capturable.rwkv import rwkv_list, rwkv_states
from t2n_hf.hf.capturable.xlstm import XlstmStates, xlstm_states

__all__ = ["OwnCache", "own_cache"]


@dataclass(frozen=True)
class OwnCache:
    """A cache of its own kind.

    Attributes:
        layout: says what each layer of a model keeps.
        arguments: gives, for a model, a cache and whether the model is being captured, a context in which the model
            takes that cache by these arguments; the cache is up to date when the context ends.
        takes_mask: whether a mask of padding has an effect.
        lone_rows: whether transformers runs one sequence at a time only.
    """

    layout: Callable[[PreTrainedModel], tuple[LayerStates, ...]]
    arguments: Callable[[PreTrainedModel, StateCache, bool], Any]
    takes_mask: bool = False
    lone_rows: bool = False


def own_cache(model: PreTrainedModel) -> OwnCache | None:
    """What is known of the cache of `model`; None for a model with a common one, or none."""
    return _OWN.get(model.config.get_text_config(decoder=True).model_type)


@contextmanager
def _minimax(model: PreTrainedModel, cache: StateCache, _captured: bool) -> Iterator[dict[str, Any]]:
    # With use_cache it asks for a MiniMaxCache; without, it uses what it is given.
    yield {cache_parameter(model.forward) or "cache": cache, "use_cache": False}


@contextmanager
def _rwkv(_model: PreTrainedModel, cache: StateCache, captured: bool) -> Iterator[dict[str, Any]]:
    if captured:  # its blocks take the cache itself
        yield {"state": cache, "use_cache": True}
        return
    with rwkv_list(cache) as listed:
        yield {"state": listed, "use_cache": True}


@contextmanager
def _xlstm(model: PreTrainedModel, cache: StateCache, _captured: bool) -> Iterator[dict[str, Any]]:
    yield {cache_parameter(model.forward) or "cache": XlstmStates(cache), "use_cache": True}


_OWN: Final[Mapping[str, OwnCache]] = {
    "minimax": OwnCache(minimax_states, _minimax, takes_mask=True),
    # A single token of several sequences: it broadcasts their states against each other.
    "rwkv": OwnCache(rwkv_states, _rwkv, lone_rows=True),
    "xlstm": OwnCache(xlstm_states, _xlstm),
}
