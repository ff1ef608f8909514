"""A call whose results are known, put into the graph that is being traced without a way through the dispatcher.

A tracer runs each operator under several modes, makes a fake of every result, records where in the code it was called,
and notes a proxy for each of its lengths: milliseconds for a call of a layer, of which a model has many that are alike.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot

__all__ = ["SeenCall", "call_like", "seen_call"]


@dataclass(frozen=True)
class SeenCall:
    """A call that went through the dispatcher: its tracer, which knows the lengths of its results, and these."""

    tracer: Any
    results: tuple[torch.Tensor, ...]


def seen_call(results: Sequence[torch.Tensor]) -> SeenCall:
    """Remember a call by its results, as they are now; what a model does with those that it has is not seen."""
    kept = [fast_detach(result.fake_mode, result) if isinstance(result, FakeTensor) else result for result in results]
    return SeenCall(_tracer(), tuple(kept))


def call_like(seen: SeenCall, target: Any, args: Sequence[Any]) -> list[torch.Tensor] | None:  # noqa: ANN401
    """Record `target(*args)`, whose results are like those of `seen`.

    None when that has to go through the dispatcher, because nothing is traced, or by another tracer, or because a
    tensor in `args`, or in a list there, is not known to it.
    """
    tracer = _tracer()
    if tracer is None or tracer is not seen.tracer or not all(isinstance(one, FakeTensor) for one in seen.results):
        return None
    try:
        nodes = fx.node.map_aggregate(tuple(args), lambda leaf: _node_of(leaf, tracer))
    except LookupError:
        return None
    recorded, tracer.record_stack_traces = tracer.record_stack_traces, False
    try:
        with torch._C.DisableTorchFunction():
            call = tracer.create_node("call_function", target, nodes, {}, name=target.overloadpacket.__name__)
            call.meta["val"] = list(seen.results)
            return [_item(call, place, result, tracer) for place, result in enumerate(seen.results)]
    finally:
        tracer.record_stack_traces = recorded


def _tracer() -> Any:  # noqa: ANN401 - torch's tracers have no public type
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def _node_of(leaf: Any, tracer: Any) -> Any:  # noqa: ANN401 - an argument, as torch's tracers take them
    if not isinstance(leaf, torch.Tensor):
        return leaf
    slot: Any = get_proxy_slot(leaf, tracer, None)
    if slot is None:
        raise LookupError
    return slot.proxy.node


def _item(call: fx.Node, place: int, like: Any, tracer: Any) -> torch.Tensor:  # noqa: ANN401
    node = tracer.graph.create_node("call_function", operator.getitem, (call, place), {})
    node.meta = {key: dict(value) if isinstance(value, dict) else value for key, value in call.meta.items()}
    node.meta["val"] = like
    fresh: torch.Tensor = fast_detach(like.fake_mode, like)
    tracer.tensor_tracker[fresh] = _ProxyTensor(fx.Proxy(node, tracer), None)
    return fresh
