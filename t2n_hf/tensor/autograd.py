"""Gradients through opaque weights, which are frozen: for the input and the bias of a product, never for the weight."""

from typing import Any

import torch

__all__ = ["LinearThroughOpaque"]


class LinearThroughOpaque(torch.autograd.Function):
    """`x @ weight.T + bias` with a gradient for x and bias; the weight's values are made again for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        """Compute the product by the weight's own rule. x: (..., K), weight: an OpaqueTensor (N, K)."""
        ctx.weight, ctx.has_bias = weight, bias is not None
        return weight._linear(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:  # noqa: ANN401
        """Give the gradients that are asked for."""
        grad = grads[0]
        for_x = ctx.weight._linear_backward(grad) if ctx.needs_input_grad[0] else None
        needs_bias = ctx.has_bias and ctx.needs_input_grad[2]
        return for_x, None, grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
