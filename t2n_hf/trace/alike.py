"""Inputs that are alike, traced as one: what a capture costs then does not grow with the number of caches.

torch.export makes symbols, guards and proofs for each of its inputs. A model has two caches for each layer, all of one
shape and with the same free lengths, so that one of them is given to the tracer, and the others are made like it by a
call. Afterwards the results of that call become inputs of the graph.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from t2n_hf.trace.direct_call import seen_call
from t2n_hf.trace.late_calls import inputs_like

__all__ = ["ALIKE_OP", "groups_of", "inputs_restored", "spread"]

_FEW: Final = 4  # so many inputs that are alike are worth a call


@torch.library.custom_op("t2n_hf::alike", mutates_args=(), tags=torch.Tag.flexible_layout)
def _alike(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    raise RuntimeError("t2n_hf::alike stands for inputs while a model is captured; it cannot be executed")


@_alike.register_fake
def _(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [torch.empty_like(like) for _ in range(count)]


ALIKE_OP: Final = torch.ops.t2n_hf.alike.default


def groups_of(tensors: Sequence[torch.Tensor], dims: Sequence[Mapping[int, Any]]) -> list[list[int]]:
    """Numbers of the tensors by what they are like: the first of a group stands for all of it."""
    groups: dict[Any, list[int]] = {}
    for number, (tensor, entry) in enumerate(zip(tensors, dims, strict=True)):
        lengths = tuple(sorted((axis, id(dim)) for axis, dim in entry.items()))
        groups.setdefault((tuple(tensor.shape), tensor.dtype, lengths), []).append(number)
    found: list[list[int]] = []
    for numbers in groups.values():
        found.extend([numbers] if len(numbers) >= _FEW else [[number] for number in numbers])
    return sorted(found)


def spread(firsts: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """All inputs in order, from the first of each group."""
    tensors: dict[int, torch.Tensor] = {}
    for first, (number, *others) in zip(firsts, groups, strict=True):
        tensors[number] = first
        if others:
            tensors.update(zip(others, _like(first, others), strict=True))
    return [tensors[number] for number in range(len(tensors))]


def _like(first: torch.Tensor, others: Sequence[int]) -> list[torch.Tensor]:
    # A call that nothing uses shows the tracer what comes of one.
    seen = seen_call(torch.ops.t2n_hf.alike(first, 1))
    return inputs_like(seen, ALIKE_OP, first, others) or torch.ops.t2n_hf.alike(first, len(others))


def inputs_restored(graph: fx.Graph, firsts: Sequence[fx.Node], groups: Sequence[Sequence[int]]) -> list[fx.Node]:
    """Make inputs of what `spread` made, in place; gives all inputs in order. `firsts` are the placeholders."""
    nodes: dict[int, fx.Node] = {}
    last = firsts[-1] if firsts else None
    for first, (number, *others) in zip(firsts, groups, strict=True):
        nodes[number] = first
        calls = [user for user in first.users if user.target is ALIKE_OP]
        parts = [user for call in calls for user in call.users if user.target is operator.getitem]
        for place, other in enumerate(others):
            with graph.inserting_after(last):
                last = nodes[other] = graph.placeholder(f"{first.name}_like_{place}")
            nodes[other].meta = {"val": first.meta["val"]}
            for part in parts:
                if part.args[1] == place:
                    nodes[other].meta = {**part.meta, "val": part.meta["val"]}
                    part.replace_all_uses_with(nodes[other])
        for node in (*parts, *calls):
            graph.erase_node(node)
    return [nodes[number] for number in range(len(nodes))]
