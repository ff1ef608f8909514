"""An encoder-decoder model as two graphs: the encoder with the keys and values of cross-attention, and the decoder.

The encoder gives `cross_key_i` and `cross_value_i` [B, H, E, D] once; the decoder takes them, unchanged, in each of its
calls, with S new tokens after P past ones. Symbols: B sequences, E positions of the encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.cross import RecordedCaches, WholePairCache
from t2n_hf.hf.caches.whole import cache_parameter
from t2n_hf.hf.capturable.causal_masks import causal_with_cache
from t2n_hf.hf.tasks.inputs import ModelInput, main_input, token_inputs
from t2n_hf.hf.tasks.pipeline import Pipeline
from t2n_hf.hf.tasks.settings import capture_settings, last_position_only, outer_lists, takes, usable_context
from t2n_hf.hf.tasks.table import Task
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.shapes import shapes_only

__all__ = ["encoder_decoder_pipeline"]

_NEW: Final = 3
_PAST: Final = 6


@dataclass(frozen=True)
class _Shapes:
    """What a run of the model showed: [B, E, width] of the encoder, keys and values of both caches, at one token."""

    states: tuple[int, ...]
    own: list[tuple[int, ...]]
    cross: list[tuple[int, ...]]


def encoder_decoder_pipeline(
    model: PreTrainedModel, task: Task, dtype: torch.dtype, *, all_logits: bool, max_context: int | None
) -> Pipeline:
    """Describe an encoder-decoder model; `max_context` bounds the decoder's S + P. No weight is read.

    Raises ConfigError for a model whose decoder keeps no keys and values, and one whose encoder mixes images and text.
    """
    if task.name == "image-text-to-text" and model.main_input_name == "input_ids":
        raise ConfigError(
            f"the encoder of {type(model).__name__} reads images among tokens, which is not supported; its text alone "
            "exports with task='text2text-generation'"
        )
    cache_name = cache_parameter(model.forward)
    if cache_name is None:
        raise ConfigError(f"{type(model).__name__} takes no key/value cache, which {task.name} needs")
    batch = torch.export.Dim("B", min=1)
    inputs = _encoder_inputs(model, batch)
    encoder = _Encoder(model, tuple(given.name for given in inputs), cache_name)
    shapes = _shapes_of(encoder, inputs)
    names = [f"{side}_{layer}" for layer in range(len(shapes.own) // 2) for side in ("key", "value")]
    parts = {
        "encoder": _encoder_interface(encoder, inputs, names, task),
        "decoder": _decoder_interface(
            _Decoder(model, cache_name, shapes.states[-1], all_logits=all_logits),
            shapes,
            names,
            dtype=dtype,
            task=task,
            batch=batch,
            length=_length_dim(model, inputs),
            masked=any(given.name == "attention_mask" for given in inputs),
            max_context=max_context,
        ),
    }

    def answer(given: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        outputs = model(**given, decoder_input_ids=tokens, use_cache=False, return_dict=True)
        return outputs.logits[:, -1]

    begin = _start(model)
    return Pipeline(task=task.name, parts=parts, answer=answer, start=lambda _inputs: begin)


def _encoder_inputs(model: PreTrainedModel, batch: Any) -> list[ModelInput]:  # noqa: ANN401 - a Dim
    name = model.main_input_name
    if name == "inputs":  # whatever the encoder is made for
        name = getattr(model.get_encoder(), "main_input_name", name)
    if name == "input_ids":
        return token_inputs(("input_ids", "attention_mask"), "E", usable_context(model), batch)
    return [main_input(model, name, batch)]


def _length_dim(model: PreTrainedModel, inputs: list[ModelInput]) -> Any:  # noqa: ANN401 - a Dim, or None
    """The free length of the encoder's output, as the decoder sees it; None when it is fixed."""
    if inputs[0].length is None:
        return None
    return inputs[0].dims[1] if inputs[0].length == "E" else torch.export.Dim("E", min=1)


def _start(model: PreTrainedModel) -> torch.Tensor:
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, name, None)
            if token is not None:
                return torch.tensor([[token[0] if isinstance(token, list) else token]])
    return torch.zeros(1, 1, dtype=torch.int64)


def _shapes_of(encoder: "_Encoder", inputs: list[ModelInput]) -> _Shapes:
    model = encoder.model
    with capture_settings(model), shapes_only(model):
        examples = [torch.empty(tuple(given.example.shape), dtype=given.example.dtype) for given in inputs]
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        states, caches = encoder.run([e.to(kind) if e.is_floating_point() else e for e in examples])
        if not caches.cross():
            raise ConfigError(
                f"the decoder of {type(model).__name__} attends to nothing of the encoder (add_cross_attention in its "
                "configuration), so that there is nothing to hand over"
            )
        return _Shapes(
            tuple(states.shape), [tuple(t.shape) for t in caches.own()], [tuple(t.shape) for t in caches.cross()]
        )


def _cached(model: PreTrainedModel) -> dict[str, bool]:
    # A model that hands all its options on would give this one to its encoder too, which refuses it.
    return {"use_cache": True} if takes(model.forward, "use_cache") else {}


@final
class _Encoder(nn.Module):
    """The encoder, and what each layer of the decoder makes of its output."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...], cache_name: str) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._cache_name = cache_name

    def run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, RecordedCaches]:
        """Run the model on one token: of the decoder, only the keys and values of cross-attention are of use."""
        caches = RecordedCaches()
        token = torch.zeros(inputs[0].shape[0], 1, dtype=torch.int64)
        outputs = self.model(
            **dict(zip(self._names, inputs, strict=True)),
            **{self._cache_name: caches},
            **_cached(self.model),
            decoder_input_ids=token,
            return_dict=True,
        )
        return outputs.encoder_last_hidden_state, caches

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Give the last hidden state [B, E, width], then keys and values [B, H, E, D] by turns."""
        states, caches = self.run(inputs)
        return (states, *caches.cross())


def _encoder_interface(encoder: _Encoder, inputs: list[ModelInput], names: list[str], task: Task) -> Interface:
    model = encoder.model
    symbols = sorted({dim.__name__ for given in inputs for dim in given.dims.values()})
    longest = {dim.__name__: dim.max for given in inputs for dim in given.dims.values()}
    bounds = [f"{name} < {longest[name] + 1}" for name in symbols if isinstance(longest[name], int)]
    return Interface(
        module=encoder,
        args=([given.example for given in inputs],),
        dynamic_shapes=([dict(given.dims) for given in inputs],),
        input_names=tuple(given.name for given in inputs),
        output_names=("last_hidden_state", *(f"cross_{name}" for name in names)),
        asserts=(*(f"{name} >= 1" for name in symbols), *bounds),
        layers=outer_lists(encoder, model.get_encoder()),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
    )


@dataclass
class _States(BaseModelOutput):
    """The encoder's output as models look at it: some ask for the mask, or the choice of experts, that theirs gives.

    Where it has a `pooler_output`, PP-FormulaNet attends to that, or to nothing.
    """

    pooler_output: torch.Tensor | None = None

    attention_mask: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@final
class _Decoder(nn.Module):
    """The decoder with its own cache, and the encoder's output as keys and values."""

    def __init__(self, model: PreTrainedModel, cache_name: str, width: int, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_name
        self._width = width
        self.all_logits = all_logits

    def forward(
        self,
        input_ids: torch.Tensor,
        masks: list[torch.Tensor],
        own: list[torch.Tensor],
        cross: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Run S new tokens after P past ones.

        `input_ids` is [B, S] i64, `masks` holds the encoder's mask [B, E] i64 or nothing, `own` are keys and values by
        turns [B, H, P, D], `cross` those of the encoder [B, H, E, D]. Returns logits and the caches grown by S.
        """
        batch, _, positions, _ = cross[0].shape
        # The model looks at the shape of the encoder's output; its values are in `cross` already.
        states = cross[0].new_zeros(1, 1, 1).expand(batch, positions, self._width)
        cache = WholePairCache(own, cross)
        arguments: dict[str, Any] = {self._cache_name: cache, **_cached(self.model), "return_dict": True}
        if masks:
            arguments["attention_mask"] = masks[0]
        head = None if self.all_logits else _head(self.model)
        with last_position_only(head), causal_with_cache(self.model):
            outputs = self.model(
                encoder_outputs=_States(last_hidden_state=states, pooler_output=states),
                decoder_input_ids=input_ids,
                **arguments,
            )
        return (outputs.logits, *cache.self_attention_cache.tensors())


def _head(model: PreTrainedModel) -> Any:  # noqa: ANN401 - a module, or None
    """The layer that gives the logits. FSMT names its table of tokens in its place."""
    head = model.get_output_embeddings()
    return getattr(model.get_decoder(), "output_projection", head) if isinstance(head, nn.Embedding) else head


def _decoder_interface(
    decoder: _Decoder,
    shapes: _Shapes,
    names: list[str],
    *,
    dtype: torch.dtype,
    task: Task,
    batch: Any,  # noqa: ANN401 - a Dim
    length: Any,  # noqa: ANN401 - a Dim, or None
    masked: bool,
    max_context: int | None,
) -> Interface:
    model = decoder.model
    limit = {} if max_context is None else {"max": max(_NEW + _PAST, max_context - 2)}
    new, past = torch.export.Dim("S", min=1, **limit), torch.export.Dim("P", min=0, **limit)
    rows, positions = shapes.states[:2]
    own = [torch.zeros(rows, heads, _PAST, size, dtype=dtype) for _, heads, _, size in shapes.own]
    cross = [torch.zeros(shape, dtype=dtype) for shape in shapes.cross]
    masks = [torch.ones(rows, positions, dtype=torch.int64)] if masked else []
    free = {} if length is None else {1: length}
    far = {} if length is None else {2: length}
    bound = () if max_context is None else (f"S+P < {max_context + 1}",)
    return Interface(
        module=decoder,
        args=(torch.zeros(rows, _NEW, dtype=torch.int64), masks, own, cross),
        dynamic_shapes=(
            {0: batch, 1: new},
            [{0: batch, **free} for _ in masks],
            [{0: batch, 2: past} for _ in own],
            [{0: batch, **far} for _ in cross],
        ),
        input_names=(
            "input_ids",
            *("encoder_attention_mask" for _ in masks),
            *(f"in_cache_{name}" for name in names),
            *(f"cross_{name}" for name in names),
        ),
        output_names=("outputs", *(f"out_cache_{name}" for name in names)),
        # No scenarios ("tg: S==1"): with four symbols they cost tract seconds of load per layer.
        asserts=("B >= 1", "P >= 0", "S >= 1", *(() if length is None else ("E >= 1",)), *bound),
        layers=outer_lists(decoder, model.get_decoder()),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context, "all_logits": decoder.all_logits},
    )
