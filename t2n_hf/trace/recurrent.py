"""Recurrent layers of torch kept as one call each while a model is captured, so that the sequence stays free."""

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["RECURRENT_OP", "RecurrentLayersKept"]

_LAYERS: Final = {getattr(torch._VF, name): name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


@torch.library.custom_op("t2n_hf::recurrent", mutates_args=())
def _recurrent(  # noqa: PLR0917 - the signature of torch's own operators
    kind: str,
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    """`torch._VF.<kind>`: the outputs [S, N, H] ([N, S, H] for batch_first), then each last state [L, N, H]."""
    states = hx if kind == "lstm" else hx[0]
    layer = getattr(torch._VF, kind)
    results = layer(x, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return [result.clone() for result in results]


@_recurrent.register_fake
def _(  # noqa: PLR0917 - the signature of torch's own operators
    kind: str,
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    size = hx[0].shape[2] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:2], size), *(torch.empty_like(state) for state in hx)]


RECURRENT_OP: Final = torch.ops.t2n_hf.recurrent.default


class RecurrentLayersKept(TorchFunctionMode):
    """Inside of it, torch's recurrent layers are calls of `RECURRENT_OP`.

    torch has no shapes for them but by running every step, which fixes the number of steps at that of the example.
    Layers over packed sequences are left as they are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Replace a call of a recurrent layer; let any other pass."""
        kind = _LAYERS.get(func) if callable(func) and not kwargs else None
        if kind is None or not isinstance(args[3], bool):
            return func(*args, **(kwargs or {}))
        x, states, params, *options = args
        hx = list(states) if kind == "lstm" else [states]
        output, *last = RECURRENT_OP(kind, x, hx, list(params), *options)
        return (output, *last)
