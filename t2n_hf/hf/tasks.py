"""What each task of transformers looks like from outside: the Interface of a model.

A causal language model gets the interface that tract's own tools expect: token ids and one cache tensor per key and
value in, logits and the grown caches out, with the symbols S (new tokens) and P (past tokens).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches import WholeCache, cache_parameter, cache_shapes
from t2n_hf.hf.rotary import capturable_rotary, rope_switch
from t2n_hf.trace.interface import Interface

__all__ = ["TASKS", "Task", "auto_class", "capture_settings", "interface_of", "usable_context"]

# Lengths of the example: they differ from each other, and rarely equal a dimension of a model.
_NEW, _PAST, _BATCH = 5, 6, 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: the auto class that loads its models, how their class names end, and the model output it exports."""

    name: str
    auto: str
    endings: tuple[str, ...]
    output: str


TASKS: Final = {
    task.name: task
    for task in (
        Task(
            name="text-generation", auto="AutoModelForCausalLM", endings=("ForCausalLM", "LMHeadModel"), output="logits"
        ),
        Task(name="fill-mask", auto="AutoModelForMaskedLM", endings=("ForMaskedLM",), output="logits"),
        Task(
            name="text-classification",
            auto="AutoModelForSequenceClassification",
            endings=("ForSequenceClassification",),
            output="logits",
        ),
        Task(
            name="token-classification",
            auto="AutoModelForTokenClassification",
            endings=("ForTokenClassification",),
            output="logits",
        ),
        # The last one: "LMHeadModel" ends in "Model" too.
        Task(name="feature-extraction", auto="AutoModel", endings=("Model",), output="last_hidden_state"),
    )
}


def auto_class(task: str) -> Any:  # noqa: ANN401 - an auto class of transformers, which has no common type
    """The auto class of transformers that loads models for `task`. Raises ConfigError for an unknown task."""
    return getattr(transformers, _task(task).auto)


def interface_of(
    model: PreTrainedModel,
    *,
    task: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    all_logits: bool = False,
    max_context: int | None = None,
) -> Interface:
    """Describe how `model` is exported. Nothing is run and no weight is read.

    Args:
        model: a model of transformers, in any state of loading.
        task: one of `TASKS`; None finds it by the class of the model.
        dtype: type of the numbers in the archive, hence of the caches.
        all_logits: give the logits of every new position instead of the last one's (text-generation only).
        max_context: bound on S + P (on S for encoders); None takes what the model was made for.

    Raises ConfigError for a model or a combination that is not supported; the text lists what is.
    """
    name = task or _task_of_class(type(model).__name__, model.config)
    found = _task(name)
    if model.config.is_encoder_decoder or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise _unsupported(type(model).__name__, model.config)
    context = _context(model, max_context)
    if found.name == "text-generation":
        return _causal(model, getattr(torch, dtype_of(dtype).torch), all_logits=all_logits, max_context=context)
    if all_logits:
        raise ConfigError(f"all_logits is for text-generation; task {name} has no choice of positions")
    return _encoder(model, found, max_context=context)


@contextmanager
def capture_settings(model: PreTrainedModel) -> Iterator[None]:
    """Set `model` up so that it can be captured; everything is as before after any exit.

    Evaluation mode, scaled-dot-product or eager attention, experts as batched matrix products (the default dispatches
    on the data), and rotary embeddings that do not branch on the length.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        if model.config._attn_implementation not in ("sdpa", "eager"):
            stack.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation("sdpa")
        stack.callback(model.set_experts_implementation, model.get_experts_implementation())
        model.set_experts_implementation("batched_mm")
        stack.enter_context(capturable_rotary(model))
        yield


def usable_context(model: PreTrainedModel) -> int | None:
    """Number of positions that the model was made for, or None when it has no bound."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    # The RoBERTa family counts its positions from padding_idx + 1.
    padding = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    return positions - padding - 1 if isinstance(padding, int) else positions


def _context(model: PreTrainedModel, asked: int | None) -> int | None:
    usable = usable_context(model)
    if asked is None:
        return usable
    if asked < 1 or (usable is not None and asked > usable):
        limit = "a positive number" if usable is None else f"1 to {usable}, the positions that the model has"
        raise ConfigError(f"max_context={asked}; expected {limit}")
    return asked


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; supported tasks: {', '.join(TASKS)}")
    return TASKS[name]


def _task_of_class(class_name: str, config: PreTrainedConfig) -> str:
    if config.is_encoder_decoder:
        raise _unsupported(class_name, config)
    for task in TASKS.values():
        if class_name.endswith(task.endings):
            return task.name
    raise _unsupported(class_name, config)


def _unsupported(class_name: str, config: PreTrainedConfig) -> ConfigError:
    supported = "; ".join(f"{t.name} (classes *{', *'.join(t.endings)})" for t in TASKS.values())
    what = "an encoder-decoder model" if config.is_encoder_decoder else "not a text model of a supported task"
    return ConfigError(
        f"{class_name} ({config.model_type}) is {what}; supported, for token ids as input: {supported}. "
        "Any other module can be exported with example_args, dynamic_shapes and names of its own"
    )


@final
class _CausalLM(nn.Module):
    """A causal language model as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, cache_name: str, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self._cache_name = cache_name
        self._all_logits = all_logits
        self._keeps = _takes(model.forward, "logits_to_keep")

    def forward(self, input_ids: torch.Tensor, caches: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run S new tokens after P past ones.

        `input_ids` is [1, S] i64, `caches` are keys and values by turns, [1, H, P, D]. Returns the logits, then the
        caches grown to [1, H, P+S, D].
        """
        cache = WholeCache(caches)
        arguments = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        if self._keeps:
            arguments["logits_to_keep"] = 0 if self._all_logits else 1
        with _last_position_only(None if self._keeps or self._all_logits else self.model.get_output_embeddings()):
            logits = self.model(input_ids=input_ids, **arguments).logits
        return (logits, *cache.tensors())


@contextmanager
def _last_position_only(head: nn.Module | None) -> Iterator[None]:
    """Let `head` see only the last position of what it is given."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def _causal(model: PreTrainedModel, dtype: torch.dtype, *, all_logits: bool, max_context: int | None) -> Interface:
    cache_name = cache_parameter(model.forward)
    if cache_name is None:
        raise ConfigError(f"{type(model).__name__} takes no key/value cache, which text-generation needs")
    shapes = cache_shapes(model.config)
    caches = [torch.zeros(side(_PAST), dtype=dtype) for shape in shapes for side in (shape.key, shape.value)]
    # A Dim cannot say S + P <= N. Models that cut a table at S + P want each of them to leave room for the other.
    limit = {} if max_context is None else {"max": max(_NEW + _PAST, max_context - 2)}
    new, past = torch.export.Dim("S", min=1, **limit), torch.export.Dim("P", min=0, **limit)
    sides = [f"{side}_{i}" for i in range(len(shapes)) for side in ("key", "value")]
    bound = () if max_context is None else (f"S+P < {max_context + 1}",)
    return Interface(
        module=_CausalLM(model, cache_name, all_logits=all_logits),
        args=(torch.zeros(1, _NEW, dtype=torch.int64), caches),
        dynamic_shapes=({1: new}, [{2: past}] * len(caches)),
        input_names=("input_ids", *(f"in_cache_{side}" for side in sides)),
        output_names=("outputs", *(f"out_cache_{side}" for side in sides)),
        asserts=("P >= 0", "S >= 1", *bound, "tg: S==1", "pp: P==0"),
        layers=_layer_lists(model),
        task="text-generation",
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context, "all_logits": all_logits, "rope_switch": rope_switch(model.config)},
    )


@final
class _Encoder(nn.Module):
    """A model without a cache as a function of plain tensors."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._output = output
        self._options = {"use_cache": False} if _takes(model.forward, "use_cache") else {}

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`inputs` are [B, S] i64, in the order of the interface; returns the one output of the task."""
        outputs = self.model(**dict(zip(self._names, inputs, strict=True)), **self._options, return_dict=True)
        return (outputs[self._output],)


def _encoder(model: PreTrainedModel, task: Task, *, max_context: int | None) -> Interface:
    names = ["input_ids", "attention_mask"]
    if _takes(model.forward, "token_type_ids") and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    missing = [name for name in names if not _takes(model.forward, name)]
    if missing:
        raise ConfigError(f"{type(model).__name__}.forward takes no {', '.join(missing)}, which {task.name} needs")
    example = [torch.ones(_BATCH, _NEW, dtype=torch.int64) for _ in names]
    limit = {} if max_context is None else {"max": max_context}
    sizes = {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("S", min=1, **limit)}
    return Interface(
        module=_Encoder(model, tuple(names), task.output),
        args=(example,),
        dynamic_shapes=([sizes] * len(names),),
        input_names=tuple(names),
        output_names=(task.output,),
        asserts=("B >= 1", "S >= 1", *(() if max_context is None else (f"S < {max_context + 1}",))),
        layers=_layer_lists(model),
        task=task.name,
        weight_owner=model,
        prefix="model",
        context=lambda: capture_settings(model),
        extra={"max_context": max_context},
    )


def _takes(forward: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(forward).parameters


def _layer_lists(model: PreTrainedModel) -> tuple[str, ...]:
    """Names, inside the wrapper, of the lists that hold the model's layers: as long as it has layers, and outermost."""
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not inside:
            found.append(name)
    return tuple(f"model.{name}" for name in found)
