"""Gradients through opaque weights, which are frozen: for the input and the bias of a product, never for the weight."""
# ruff: noqa: ANN401 - a weight here is an OpaqueTensor, whose class imports this file

from typing import Any, final

import torch

__all__ = ["linear_through"]


@final
class _Held:
    """An opaque weight that takes no part in what torch does to tensors: `torch.func` wraps them."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias` with a gradient for x and bias; the weight's values are made again for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: _Held, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the product by the weight's own rule. x: (..., K), held: of an OpaqueTensor (N, K)."""
        ctx.held, ctx.has_bias = held, bias is not None
        result: torch.Tensor = held.weight._linear(x, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        """Give the gradients that are asked for."""
        grad = grads[0]
        for_x = ctx.held.weight._linear_backward(grad) if ctx.needs_input_grad[0] else None
        needs_bias = ctx.has_bias and ctx.needs_input_grad[2]
        return for_x, None, grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None


class _LinearUnderTransforms(torch.autograd.Function):
    """The same in the form that `torch.func` takes, which costs a tenth of a millisecond more per call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, held: _Held, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the product."""
        result: torch.Tensor = held.weight._linear(x, bias)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what backward needs."""
        _, ctx.held, bias = inputs
        ctx.has_bias, ctx.shape = bias is not None, output.shape

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor | None, _: None, bias: torch.Tensor | None) -> torch.Tensor:
        """Give the tangent of the product for those of x and bias, of which one may be missing."""
        if x is None and bias is not None:
            return bias.expand(ctx.shape).clone()
        result: torch.Tensor = ctx.held.weight._linear(x, bias)
        return result

    backward = _Linear.backward


def linear_through(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`, with gradients for x and bias. `weight` is an OpaqueTensor."""
    function = _LinearUnderTransforms if torch._C._are_functorch_transforms_active() else _Linear
    result: torch.Tensor = function.apply(x, _Held(weight), bias)
    return result
