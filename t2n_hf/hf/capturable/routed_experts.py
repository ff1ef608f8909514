"""Experts that are run one after the other, each on the tokens that chose it, in a form that can be captured.

How many rows each takes depends on the data. While a model is captured, experts that are modules of their own all run
on all rows, and what did not choose them counts nothing; experts in one tensor are taken row by row, as transformers'
"batched_mm" does. Other models have experts of transformers' common kind: `set_experts_implementation` switches those.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.trace.swap import attributes_kept, methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["capturable_experts"]


@contextmanager
def capturable_experts(model: nn.Module) -> Iterator[None]:
    """Let the experts of `model` run without asking which were chosen; all modules are as before after any exit."""
    with ExitStack() as stack:
        for module in modules_of(model):
            kind = type(module).__name__
            if kind in _FORWARDS:
                stack.enter_context(methods_replaced(module, {"forward": _FORWARDS[kind]}))
            if kind in _CASTING_ROUTERS:
                stack.enter_context(attributes_kept(module))  # what a router finds at a call it keeps in itself
                classifier: Any = module.classifier
                methods: dict[str, Callable[..., Any]] = {"to": _as_it_is, "forward": _in_the_type_of_its_input}
                stack.enter_context(methods_replaced(classifier, methods))
        yield


def _as_it_is(self: nn.Module, *_args: Any, **_kwargs: Any) -> nn.Module:  # noqa: ANN401 - what `to` takes
    return self


def _in_the_type_of_its_input(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return F.linear(x, self.weight.to(x.dtype), bias)


def _switch(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """States [T, width]; experts by choice [T, K, E], 0 or 1; weights of the choices [T, K]."""
    weights = (selected_experts.to(hidden_states.dtype) * routing_weights[..., None]).sum(1)
    return _all_weighted(self, hidden_states, weights)


def _nllb(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    router_mask: torch.Tensor,
    router_probs: torch.Tensor,
) -> torch.Tensor:
    """States [T, width]; numbers of experts by choice [T, K], and weights of the choices [T, K].

    transformers' router gives a mask of 0 and 1 where its experts look for their numbers.
    """
    numbers = torch.arange(self.num_experts, device=router_mask.device)
    chosen = router_mask[..., None] == numbers
    weights = (chosen.to(hidden_states.dtype) * router_probs[..., None]).sum(1)
    return _all_weighted(self, hidden_states, weights * (1 - self.moe_token_dropout))


def _all_weighted(experts: nn.ModuleDict, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of what all experts give for `states` [T, width], by `weights` [T, E]."""
    weights = weights.to(states.dtype)
    total = torch.zeros_like(states)
    for number in range(weights.shape[1]):
        total = total + experts[f"expert_{number}"](states) * weights[:, number, None]
    return total


def _unsorted_gating(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """JetMoe's gates, without sorting the rows by their experts: these stand in the place of how many rows each has."""
    logits = self.layer(hidden_states).float()
    values, experts = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(values, dim=1).type_as(hidden_states)
    rows = torch.arange(hidden_states.shape[0] * self.top_k, device=hidden_states.device)
    return rows, rows // self.top_k, gates.flatten(), experts.flatten(), logits


def _row_by_row(
    self: Any,  # noqa: ANN401 - a class of transformers
    inputs: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Rows [R, inputs], each through the expert whose number [R] it has."""
    return torch.bmm(self.weight[experts], inputs.unsqueeze(-1)).squeeze(-1)


def _for_each_choice(states: torch.Tensor, choices: int) -> torch.Tensor:
    """Rows [T, width] -> [T * K, width, 1], one after the other for each choice."""
    return states[:, None].expand(-1, choices, -1).reshape(-1, states.shape[-1], 1)


def _dbrx(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """States [B, S, width]; numbers of experts [T, K], and weights of the choices [T, K]."""
    rows = _for_each_choice(hidden_states.reshape(-1, self.hidden_size), top_k_index.shape[-1])
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gates, ups, downs = (w.view(shape)[top_k_index.flatten()] for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    inner = self.mlp.activation_fn(torch.bmm(gates, rows)) * torch.bmm(ups, rows)
    results = torch.bmm(downs.transpose(1, 2), inner).reshape(*top_k_index.shape, -1)
    return (results * top_k_weights[..., None]).sum(1).reshape(hidden_states.shape)


def _longcat(
    self: Any,  # noqa: ANN401 - a class of transformers
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """States [T, width]; numbers of experts [T, K], the last of which change nothing, and weights of the choices."""
    rows, numbers = _for_each_choice(hidden_states, top_k_index.shape[-1]), top_k_index.flatten()
    results = rows
    if self.num_routed_experts:
        computing = numbers.clamp(max=self.num_routed_experts - 1)
        gate, up = torch.bmm(self.gate_up_proj[computing], rows).chunk(2, dim=1)
        found = torch.bmm(self.down_proj[computing], self.act_fn(gate) * up)
        results = torch.where((numbers < self.num_routed_experts)[:, None, None], found, rows)
    results = results.reshape(*top_k_index.shape, -1) * top_k_weights[..., None]
    return results.sum(1).to(hidden_states.dtype)


_FORWARDS: Final[Mapping[str, Callable[..., Any]]] = {
    "DbrxExperts": _dbrx,
    "JetMoeParallelExperts": _row_by_row,
    "JetMoeTopKGating": _unsorted_gating,
    "LongcatFlashExperts": _longcat,
    "NllbMoeExperts": _nllb,
    "SwitchTransformersExperts": _switch,
}
# These set the type of their classifier's weights at each call.
_CASTING_ROUTERS: Final = frozenset({"NllbMoeTop2Router", "SwitchTransformersTop1Router"})
