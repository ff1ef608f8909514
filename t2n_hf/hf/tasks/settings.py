"""What models have in common when they are captured: switches, bounds on positions, where their layers are."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeGuard

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.states import growing
from t2n_hf.hf.capturable.codecs import capturable_codecs
from t2n_hf.hf.capturable.forwards import capturable_forwards
from t2n_hf.hf.capturable.indexers import capturable_indexers
from t2n_hf.hf.capturable.languages import capturable_languages
from t2n_hf.hf.capturable.own_caches import own_cache
from t2n_hf.hf.capturable.pooled_places import capturable_pooled_places
from t2n_hf.hf.capturable.recurrence import capturable_recurrences
from t2n_hf.hf.capturable.rotary import capturable_rotary
from t2n_hf.hf.capturable.routed_experts import capturable_experts
from t2n_hf.hf.capturable.squeezed import capturable_squeezes
from t2n_hf.hf.capturable.windows import capturable_windows
from t2n_hf.trace.swap import evaluating
from t2n_hf.trace.walk import attribute_of, modules_of, names_of, parts_known

__all__ = [
    "capture_settings",
    "context_of",
    "last_position_only",
    "layer_lists",
    "outer_lists",
    "takes",
    "usable_context",
]


_NONE: Final[frozenset[int]] = frozenset()
# What transformers notes in a model whose layers have hooks that collect hidden states.
_HOOKED: Final = "_output_capturing_hooks_installed"
# How configurations call the number of positions (the last ones: MPT, SpeechT5, Bark).
_POSITIONS: Final = (
    "max_position_embeddings",
    "max_target_positions",
    "max_seq_len",
    "max_text_positions",
    "block_size",
)


@contextmanager
def capture_settings(model: PreTrainedModel) -> Iterator[None]:
    """Set `model` up so that it can be captured; everything is as before after any exit.

    Evaluation mode, scaled-dot-product or eager attention or one of the user's own, experts as batched matrix products
    (the default dispatches on the data), rotary embeddings that do not branch on the length, and recurrences that walk
    in one call.
    """
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if _is_replaced(model.config._attn_implementation):
            stack.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation("sdpa")
        if any(part._can_set_experts_implementation() for part in _models_in(model)):
            stack.callback(model.set_experts_implementation, model.get_experts_implementation())
            model.set_experts_implementation("batched_mm")
        stack.enter_context(capturable_rotary(model))
        with parts_known(model):
            for set_up in (_hooks_installed, capturable_recurrences, *_CAPTURABLE):
                stack.enter_context(set_up(model))
        yield


_CAPTURABLE: Final = (
    *(capturable_codecs, capturable_experts, capturable_forwards, capturable_indexers, capturable_languages),
    *(capturable_pooled_places, capturable_squeezes, capturable_windows),
)


def _models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The models that `module` has, and itself if it is one."""
    return [part for part in modules_of(module) if isinstance(part, PreTrainedModel)]


def _is_replaced(attention: str) -> bool:
    """Whether an implementation of attention gives what "sdpa" does; one that was registered may give anything."""
    function: Any = ALL_ATTENTION_FUNCTIONS.get(attention)
    while isinstance(function, functools.partial):
        function = function.func
    is_own = function is not None and not str(getattr(function, "__module__", "")).startswith("transformers.")
    return attention not in ("sdpa", "eager") and (not is_own or "/" in attention)


@contextmanager
def _hooks_installed(model: PreTrainedModel) -> Iterator[None]:
    """Have the hooks of transformers that collect hidden states on layers, as it puts them there when first asked.

    While the model is captured something else may stand in the place of its layers. A part that has its hooks already
    (a backbone that has run) would get them twice with those of a model around it, and collect every state twice: such
    a model is left to transformers. For the same reason those of this block go with it.
    """
    modules = modules_of(model)
    before = [set(module._forward_hooks) if module._forward_hooks else _NONE for module in modules]
    with ExitStack() as stack:
        for part in _models_in(model):
            if not _has_hooks(part) and not any(map(_has_hooks, modules_of(part))):
                inside = _models_in(part)
                maybe_install_capturing_hooks(part)
                for marked in filter(_has_hooks, inside):
                    stack.callback(delattr, marked, _HOOKED)
        for module, hooks in zip(modules, before, strict=True):
            for number in set(module._forward_hooks) - hooks if module._forward_hooks else _NONE:
                stack.callback(module._forward_hooks.pop, number, None)
        yield


def _has_hooks(module: nn.Module) -> bool:
    return bool(attribute_of(module, _HOOKED))


def usable_context(model: PreTrainedModel) -> int | None:
    """Number of positions that the model was made for, or None when it has no bound."""
    own = own_cache(model)
    if own is not None and not any(growing(own.layout(model))):
        return None  # what the config says is how long the texts were that it learned from
    text = model.config.get_text_config(decoder=True)
    stated = (getattr(text, name, None) for name in _POSITIONS)
    positions = next((value for value in stated if isinstance(value, int) and value > 0), None)
    if positions is None:
        return None
    # The RoBERTa family counts its positions from padding_idx + 1.
    padding = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    return positions - padding - 1 if isinstance(padding, int) else positions


def context_of(model: PreTrainedModel, asked: int | None) -> int | None:
    """Positions to export for: those asked for, or all that the model has. Raises ConfigError for more than these."""
    usable = usable_context(model)
    if asked is None:
        return usable
    if asked < 1 or (usable is not None and asked > usable):
        limit = "a positive number" if usable is None else f"1 to {usable}, the positions that the model has"
        raise ConfigError(f"max_context={asked}; expected {limit}")
    return asked


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether `forward` has a parameter of that name."""
    return name in inspect.signature(forward).parameters


def layer_lists(model: PreTrainedModel) -> tuple[str, ...]:
    """Names, inside the wrapper, of the lists that hold the model's layers: as long as it has layers, and outermost."""
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    found: list[str] = []
    for module, name in names_of(model).items():
        if _holds_layers(module) and len(module) == depth:
            found += [] if any(name.startswith(f"{outer}.") for outer in found) else [name]
    return tuple(f"model.{name}" for name in found)


def _holds_layers(module: object) -> TypeGuard[nn.ModuleList]:
    """Whether a module is a list of layers; the blocks of Funnel are lists in a list."""
    return isinstance(module, nn.ModuleList) and not any(isinstance(layer, nn.ModuleList) for layer in module)


@contextmanager
def last_position_only(head: nn.Module | None) -> Iterator[None]:
    """Let `head` see only the last position of what it is given."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def outer_lists(wrapper: nn.Module, part: nn.Module) -> tuple[str, ...]:
    """Names, inside `wrapper`, of the outermost lists in `part` that hold several layers of the same class."""
    inside = {id(module) for module in part.modules()}
    found: list[str] = []
    for name, module in wrapper.named_modules():
        alike = _holds_layers(module) and len({type(layer) for layer in module}) == 1 < len(module)
        if alike and id(module) in inside and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return tuple(found)
