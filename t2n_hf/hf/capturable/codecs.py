"""Convolutions of neural codecs (EnCodec, Mimi and those made after them), in a form that can be captured.

They compute in tensors how much a sound lacks to whole frames, and ask for the value; where a sound is shorter than
what is to be mirrored around it they put zeros first. While a model is captured the first is calculated in whole
numbers, of which one may be a symbol, and what is put around a sound is chosen by places, which holds at every length.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.trace.function_variants import in_scope
from t2n_hf.trace.swap import attributes_replaced, methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_codecs"]

_EXTRA: Final = "_get_extra_padding_for_conv1d"
_NUMBERS: Final = ("stride", "kernel_size", "padding_total", "padding_left", "padding_right")
# Methods that make sounds, and cut them to the length of a mask.
_DECODING: Final[Mapping[str, str]] = {"EncodecModel": "decode", "MimiDecoderModel": "forward"}


@contextmanager
def capturable_codecs(model: nn.Module) -> Iterator[None]:
    """Let the codecs in `model` add what frames lack without asking; after any exit all is as before."""
    with ExitStack() as stack:
        for module in modules_of(model):
            methods = _methods(type(module))  # type: ignore[arg-type]
            if _EXTRA in methods:
                numbers = {name: vars(module).get(name, module._buffers.get(name)) for name in _NUMBERS}
                values = {name: int(value) for name, value in _counted(module, numbers).items()}
                stack.enter_context(attributes_replaced(module, values))
            if methods:
                stack.enter_context(methods_replaced(module, methods))
        yield


@cache
def _methods(kind: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
    name = kind.__name__
    methods: dict[str, Callable[..., Any]] = {}
    if hasattr(kind, _EXTRA) and hasattr(kind, "_pad1d"):
        methods = {_EXTRA: _extra, "_pad1d": _padded}
    if name in _DECODING:
        methods[_DECODING[name]] = _cut_to_mask(getattr(kind, _DECODING[name]))
    if name == "EncodecModel":
        methods["encode"] = in_scope(kind.encode, {"range": _offsets})  # type: ignore[attr-defined]
    if name == "MimiEuclideanCodebook":
        methods = {"quantize": _nearest, "decode": _looked_up}
    return methods


def _counted(module: Any, known: Mapping[str, Any]) -> dict[str, int]:  # noqa: ANN401 - a class of transformers
    """Those of `_NUMBERS` that a convolution has, of what it is made of: buffers may have no values."""
    stride = module.conv.stride[0]
    kernel = (module.conv.kernel_size[0] - 1) * module.conv.dilation[0] + 1
    right = (kernel - stride) // 2
    numbers = dict(zip(_NUMBERS, (stride, kernel, kernel - stride, kernel - stride - right, right), strict=True))
    return {name: number for name, number in numbers.items() if known[name] is not None}


def _extra(self: Any, hidden_states: torch.Tensor) -> Any:  # noqa: ANN401 - a number, or a symbol of one
    """How much the last axis lacks to whole strides."""
    length = hidden_states.shape[-1]
    return 0 if self.stride == 1 else (length + self.stride - 1) // self.stride * self.stride - length


def _padded(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    paddings: tuple[int, Any],
    mode: str = "zero",
    value: float = 0.0,
) -> torch.Tensor:
    """[B, C, T] with as much before and after as `paddings` says; the second may be a symbol."""
    if mode != "reflect":
        return F.pad(hidden_states, paddings, mode, value)
    length, (before, after) = hidden_states.shape[-1], paddings
    left = [_at(hidden_states, torch.arange(before, 0, -1))] if before else []
    most = (0 if self.stride == 1 else self.stride) + (0 if self.causal else self.padding_total // 2)
    if not most:
        return torch.cat([*left, hidden_states], -1)
    # Zeros behind a sound that is no longer than what is mirrored of it.
    mirrored = before if most <= before else torch.sym_max(before, after)
    whole = torch.sym_max(length, mirrored + 1)
    behind = length + torch.arange(most)
    right = torch.where(behind < whole, behind, 2 * (whole - 1) - behind)
    mirror = torch.cat([*left, hidden_states, _at(hidden_states, right)], -1)
    return mirror if self.stride == 1 else mirror.narrow(-1, 0, before + length + after)


def _at(sound: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What is at `places` of [B, C, T], zeros after its end."""
    length = sound.shape[-1]
    return torch.where(places < length, sound[..., places.clamp(max=length - 1)], 0.0)


def _codes(codebook: Any) -> torch.Tensor:  # noqa: ANN401 - a class of transformers
    """The rows of a codebook, [N, D]; its own property keeps them from call to call, as a capture cannot."""
    rows: torch.Tensor = codebook.embed_sum / codebook.cluster_usage.clamp(min=codebook.epsilon)[:, None]
    return rows


def _nearest(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a class of transformers
    """Which code is nearest to each of [N, D], [N] i64."""
    return torch.cdist(hidden_states[None].float(), _codes(self)[None].float(), p=2)[0].argmin(dim=-1)


def _looked_up(self: Any, embed_ind: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a class of transformers
    return F.embedding(embed_ind, _codes(self))


def _offsets(begin: int, end: Any, step: Any) -> Any:  # noqa: ANN401 - numbers, or symbols of them
    """Where chunks begin; one that is as long as the sound is the only one."""
    return (begin,) if step is end else range(begin, end, step)


def _cut_to_mask(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes a sound, which it cuts to its mask without asking whether it is longer: it is no shorter."""
    signature = inspect.signature(method)

    def cut(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        given = signature.bind(self, *args, **kwargs)
        mask = given.arguments.pop("padding_mask", None)
        result = method(*given.args, **given.kwargs)
        if mask is None:
            return result
        # One sample more: never all of it is taken, which torch has for another case.
        sound = F.pad(result[0], (0, 1)).narrow(-1, 0, mask.shape[-1])
        if isinstance(result, tuple):
            return (sound, *result[1:])
        result["audio_values"] = sound
        return result

    return cut
