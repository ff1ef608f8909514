"""A causal language model as tract's own tools expect it.

Token ids and one cache tensor per key and value in, logits and the grown caches out, with the symbols S (new tokens)
and P (past tokens). Layers that keep a state of fixed size have it as input and output in the same way.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.states import KEY_VALUE_LENGTH, LayerStates, StateCache, growing, past_length
from t2n_hf.hf.caches.whole import WholeCache, cache_parameter
from t2n_hf.hf.capturable.griffin import griffin_states
from t2n_hf.hf.capturable.own_caches import own_cache
from t2n_hf.hf.capturable.recurrence import begins_anew
from t2n_hf.hf.capturable.rotary import rope_switch
from t2n_hf.hf.tasks.layout import cache_example, cache_layout, cache_names
from t2n_hf.hf.tasks.settings import capture_settings, last_position_only, layer_lists, takes
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.walk import attribute_of, modules_of

__all__ = ["CausalOptions", "causal_interface"]

# Lengths of the example: they differ from each other, and rarely equal a dimension of a model.
_NEW: Final = 5
_PAST: Final = 6
_BATCH: Final = 2


@final
class _CausalLM(nn.Module):
    """A causal language model as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, layout: Sequence[LayerStates], *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_parameter(model.forward)
        self._own = own_cache(model)
        self._layout = tuple(layout)
        self._has_states = not all(states.plain for states in layout)
        self._begins_anew = begins_anew(model)
        # Some models of states and attention count from 0 in every call, unless they are told the positions.
        self._counts = self._has_states and takes(model.forward, "position_ids")
        self._all_logits = all_logits
        self._keeps = takes(model.forward, "logits_to_keep")
        self._captured = False

    def forward(
        self,
        input_ids: torch.Tensor,
        caches: list[torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run S new tokens after P past ones.

        `input_ids` is [B, S] i64, `caches` are what each layer keeps: keys and values [B, H, P, D], and states. The
        mask [B, P+S] i64 is 0 where a token is padding (all padding before all tokens), the positions are [B, S] i64.
        Returns the logits, then the caches, keys and values grown to [B, H, P+S, D].
        """
        if attention_mask is not None and self._pads_some(input_ids, attention_mask):
            return self._each_row(input_ids, caches, attention_mask, position_ids)
        if self._own is not None and self._own.lone_rows and not self._captured and input_ids.shape[0] > 1:
            return self._each_row(input_ids, caches, None, position_ids)
        past = past_length(caches, self._layout)
        if attention_mask is not None and attention_mask.shape[1] != input_ids.shape[1] + past:
            raise ConfigError(f"a mask of {attention_mask.shape[1]} for {input_ids.shape[1]} tokens after {past}")
        options = {} if attention_mask is None else {"attention_mask": attention_mask}
        if position_ids is not None:
            options["position_ids"] = position_ids
        elif self._counts:
            options["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0) + past
        if not self._has_states:
            cache: Any = WholeCache(caches)
            return (self._logits(input_ids, cache, options), *cache.tensors())
        # transformers writes to states in place.
        cache = StateCache([tensor.clone() for tensor in caches], self._layout)
        with nullcontext() if self._captured else griffin_states(self.model):
            logits = [self._logits(*span) for span in self._spans(input_ids, cache, options)]
        return (torch.cat(logits, dim=1) if self._all_logits else logits[-1], *cache.tensors())

    def _pads_some(self, input_ids: torch.Tensor, mask: torch.Tensor) -> bool:
        """Whether rows have to be run one by one: some go on from a past that the call for the others would forget."""
        if self._captured or not self._begins_anew:
            return False
        padded = (mask[:, -input_ids.shape[1] :] == 0).any(dim=1)
        return bool(padded.any()) and not bool(padded.all())

    def _each_row(
        self,
        input_ids: torch.Tensor,
        caches: list[torch.Tensor],
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        rows = []
        for at in range(input_ids.shape[0]):
            some = [at] if mask is None else [at, at]  # layers of states ignore the mask of a lone row
            options = [None if option is None else option[some] for option in (mask, positions)]
            found = self.forward(input_ids[some], [cache[some] for cache in caches], *options)
            rows.append([part[:1] for part in found])
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def _spans(
        self, input_ids: torch.Tensor, cache: StateCache, options: dict[str, torch.Tensor]
    ) -> list[tuple[Any, ...]]:
        """The calls of the model: one, but token by token where its layers would forget the past otherwise."""
        if self._captured or not self._begins_anew:
            return [(input_ids, cache, options)]
        new, mask = input_ids.shape[1], options.get("attention_mask")
        if mask is not None and bool((mask[:, -new:] == 0).any()):  # padding is where nothing was seen before
            return [(input_ids, cache, options)]
        spans = []
        for at in range(new):
            now = {name: value[:, at : at + 1] for name, value in options.items()}
            if mask is not None and any(growing(self._layout)):
                now["attention_mask"] = mask[:, : mask.shape[1] - new + at + 1]
            spans.append((input_ids[:, at : at + 1], cache, now))
        return spans

    def _logits(self, input_ids: torch.Tensor, cache: Any, options: dict[str, Any]) -> torch.Tensor:  # noqa: ANN401 - any cache
        if self._keeps:
            options = {**options, "logits_to_keep": 0 if self._all_logits else 1}
        with (
            last_position_only(None if self._keeps or self._all_logits else self.model.get_output_embeddings()),
            self._cached(cache) as arguments,
        ):
            return self.model(input_ids=input_ids, return_dict=True, **arguments, **options).logits

    def _cached(self, cache: Any) -> AbstractContextManager[dict[str, Any]]:  # noqa: ANN401 - as above
        if self._own is not None:
            return self._own.arguments(self.model, cache, self._captured)
        if self._cache_name is None:
            return nullcontext({})
        return nullcontext({self._cache_name: cache, "use_cache": True})

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Let calls be captured, until the block is left in any way."""
        with capture_settings(self.model):
            self._captured = True
            try:
                yield
            finally:
                self._captured = False


@dataclass(frozen=True, kw_only=True)
class CausalOptions:
    """How a causal language model is exported.

    Attributes:
        dtype: of keys and values.
        all_logits: give the logits of every new position, not of the last one only.
        max_context: bound on S + P; None is no bound.
        batch: take any number of sequences, of one length.
        mask: take a mask of the tokens that are padding, and their positions.
    """

    dtype: torch.dtype = torch.float32
    all_logits: bool = False
    max_context: int | None = None
    batch: bool = False
    mask: bool = False


def causal_interface(model: PreTrainedModel, options: CausalOptions) -> Interface:
    """Describe `model` with its cache as inputs and outputs, the logits first.

    A model that keeps nothing between calls (OpenAI's first GPT) has none: it takes the whole text at each of them.

    Raises ConfigError for a model that generates in another way, whose tokens see later ones, or that takes no mask
    when that is asked for.
    """
    _refuse_what_is_not_causal(model)
    if not _keeps_something(model) and not _takes_whole_texts(model):
        raise ConfigError(
            f"{type(model).__name__} takes no key/value cache, and generate() gives it something else than the tokens: "
            "text-generation needs one of the two"
        )
    extra = _masks(model) if options.mask else ()
    layout = _layout(model)
    kept = [named for states in layout for named in states.named()]
    names = cache_names(layout)
    grows = growing(layout)
    rows = _BATCH if options.batch else 1
    caches = [
        cache_example(shape, rows, _PAST if grown else None, options.dtype)
        for (_, shape), grown in zip(kept, grows, strict=True)
    ]
    sizes = _Sizes(options, has_past=any(grows))
    module = _CausalLM(model, layout, all_logits=options.all_logits)
    return Interface(
        module=module,
        args=(
            torch.zeros(rows, _NEW, dtype=torch.int64),
            caches,
            *(torch.ones(rows, sizes.example(name), dtype=torch.int64) for name in extra),
        ),
        dynamic_shapes=(
            sizes.new,
            [sizes.cache if grown else sizes.state for grown in grows],
            *(sizes.masks[name] for name in extra),
        ),
        input_names=("input_ids", *(f"in_cache_{name}" for name in names), *extra),
        output_names=("outputs", *(f"out_cache_{name}" for name in names)),
        asserts=sizes.asserts(),
        layers=layer_lists(model),
        task="text-generation",
        weight_owner=model,
        prefix="model",
        precise=frozenset(f"in_cache_{name}" for name in names if name.startswith("state")),
        context=module.captured,
        extra={
            "max_context": options.max_context,
            "all_logits": options.all_logits,
            "rope_switch": rope_switch(model.config),
        },
    )


def _refuse_what_is_not_causal(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.model_type == "cpmant":
        raise ConfigError(
            f"{name} wants the whole text in each call, beside a cache of its prompt and past, which is not supported; "
            "export it with example_args of its own"
        )
    if model.config.model_type == "reformer":
        raise ConfigError(
            f"{name} cuts a text into chunks, sorts its tokens ('lsh') by hashes that are drawn at random, and keeps "
            "what grows in steps of a chunk, which is not supported; export it with example_args of its own, and "
            "capture='dispatch' if one length, and one draw, may do"
        )
    if attribute_of(model, "num_codebooks") is not None and attribute_of(model, "lm_heads") is not None:
        raise ConfigError(
            f"{name} takes a token of each of its {model.num_codebooks} codebooks at each step, in rows of one batch, "
            "which is not supported; export it with example_args of its own"
        )
    layers = [module for module in modules_of(model) if attribute_of(module, "is_decoder") is not None]
    if layers and not any(layer.is_decoder for layer in layers):
        raise ConfigError(
            f"tokens of this {name} see those behind them, because its configuration says is_decoder=False: load it "
            "with is_decoder=True, or name another task"
        )


def _keeps_something(model: PreTrainedModel) -> bool:
    """Whether a call can go on from what was kept of the one before."""
    return cache_parameter(model.forward) is not None or own_cache(model) is not None


def _takes_whole_texts(model: Any) -> bool:  # noqa: ANN401 - one that may generate
    """Whether transformers generates by calls with all tokens so far, and nothing else."""
    tokens = torch.zeros(1, _NEW, dtype=torch.int64)
    try:
        inspect.signature(model.forward).bind(input_ids=tokens, return_dict=True)
        given = model.prepare_inputs_for_generation(tokens)
    except (AttributeError, TypeError):  # it does not generate, or not from tokens alone
        return False
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return set(tensors) == {"input_ids"} and torch.equal(tensors["input_ids"], tokens)


def _masks(model: PreTrainedModel) -> tuple[str, ...]:
    own = own_cache(model)
    if own is not None and not own.takes_mask:
        raise ConfigError(f"{type(model).__name__} has no use for an attention_mask: export it without mask")
    if not takes(model.forward, "attention_mask"):
        raise ConfigError(f"{type(model).__name__}.forward takes no attention_mask: export it without mask")
    return ("attention_mask", "position_ids") if takes(model.forward, "position_ids") else ("attention_mask",)


class _Sizes:
    """The free lengths of a causal language model."""

    def __init__(self, options: CausalOptions, *, has_past: bool) -> None:
        self._options = options
        self._has_past = has_past
        # A Dim cannot say S + P <= N. Models that cut a table at S + P want each of them to leave room for the other.
        longest = None if options.max_context is None else max(_NEW + _PAST, options.max_context - 2)
        limit = {} if longest is None else {"max": longest}
        rows = {0: torch.export.Dim("B", min=1)} if options.batch else {}
        new = torch.export.Dim("S", min=1, **limit)
        self.new = {**rows, 1: new}
        self.state = rows or None
        self.cache = {**rows, KEY_VALUE_LENGTH: torch.export.Dim("P", min=0, **limit)}
        # Nor can it be S + P: the module says so, and the capture finds it out.
        self.masks = {
            "attention_mask": {**rows, 1: torch.export.Dim.AUTO if has_past else new},
            "position_ids": self.new,
        }

    def example(self, name: str) -> int:
        """Length of the example of a mask."""
        return _NEW + _PAST if name == "attention_mask" and self._has_past else _NEW

    def asserts(self) -> tuple[str, ...]:
        """What is known of the lengths."""
        limit, total = self._options.max_context, "S+P" if self._has_past else "S"
        facts = ("B >= 1",) if self._options.batch else ()
        bound = () if limit is None else (f"{total} < {limit + 1}",)
        # tract takes a single scenario for the only one: without a past there is no second one to name.
        scenarios = ("tg: S==1", "pp: P==0") if self._has_past else ()
        return (*facts, *(("P >= 0",) if self._has_past else ()), "S >= 1", *bound, *scenarios)


def _layout(model: PreTrainedModel) -> tuple[LayerStates, ...]:
    own = own_cache(model)
    if own is not None:
        return own.layout(model)
    if cache_parameter(model.forward) is None:
        return ()
    return cache_layout(model)
