"""A layer run beside the recording of one that was traced, to see that it calls the same operators in the same way.

To trace a layer takes time for every operator: its result is made, with the conditions that its lengths must meet, and
put into a graph. All of that is known of the first layer of a kind. The second one is run on the same stand-ins, each
operator is compared with that of the first, and answered with what came of it there.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Recording", "runs_as_recorded"]

_LENGTHS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DEVICE: Final = torch.ops.prim.device.default
_UNKNOWN: Final = object()
# Functions that are nodes of a graph without being operators: other settings of autograd and of autocast.
_OTHERS: Final[Any] = getattr(fx.node, "_side_effectful_functions", None)


@dataclass(frozen=True)
class _Call:
    """An operator with what it was called with, nodes for tensors and lengths, and the nodes of its results.

    The results themselves are not kept: torch copies what a factory makes when something else holds it. `given` has
    for each the number of the tensor in the arguments that it is, or None where it is a new one.
    """

    func: Any
    nodes: Any
    results: tuple[fx.Node, ...]
    given: tuple[int | None, ...]
    is_list: bool


@final
@dataclass
class Recording:
    """The operators of a trace in order, with the tensors that they gave.

    Attributes:
        complete: whether all that the trace did is here: operators that only make tensors of tensors and numbers.
        weights: those of the layer, by their names in it.
        inputs: the tensors in its arguments, by the number of their leaf.
        known: id of each of these tensors -> its node.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    known: dict[int, fx.Node] = field(default_factory=dict)
    complete: bool = True

    def begin(self, weights: Mapping[str, torch.Tensor], inputs: Mapping[int, torch.Tensor]) -> None:
        """Take note of the tensors that the trace that is going on starts from."""
        self.weights, self.inputs = dict(weights), dict(inputs)
        mode = get_proxy_mode()
        given = (*self.weights.values(), *self.inputs.values())
        self.known = {} if mode is None else _nodes(given, mode.tracer)
        self.complete = _OTHERS is not None and all(id(one) in self.known for one in given)

    def add(self, func: Any, given: Any, nodes: Any, out: Any, tracer: Any) -> None:
        """Take note of an operator that was called with `given`, which are `nodes` of the graph, and gave `out`."""
        results = _tensors(out)
        found = _nodes(results, tracer)
        if results is None or len(found) != len({id(one) for one in results}):
            self.complete = False
            return
        places = {id(leaf): place for place, leaf in enumerate(_leaves(given))}
        self.calls.append(
            _Call(
                func,
                nodes,
                tuple(found[id(one)] for one in results),
                tuple(places.get(id(one)) for one in results),
                isinstance(out, list | tuple),
            )
        )

    def miss(self, func: Any) -> None:
        """Take note of an operator that cannot be recorded."""
        self.complete = self.complete and func is _DEVICE

    def close(self, tracer: Any) -> None:
        """See that nothing but the recorded operators, and lengths, is in the graph."""
        for node in tracer.graph.nodes:
            if node.op == "get_attr" or (node.op == "call_function" and not _is_ordinary(node)):
                self.complete = False
            if "unbacked_bindings" in node.meta:  # a length that only values tell: that of another layer is another
                self.complete = False


def _is_ordinary(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem:
        return True
    return isinstance(node.meta.get("val"), (*_LENGTHS, int, float, bool))


def _tensors(out: Any) -> list[torch.Tensor] | None:
    parts = list(out) if isinstance(out, list | tuple) else [out]
    return parts if all(isinstance(part, FakeTensor) for part in parts) else None


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(tree, found.append)
    return found


def _nodes(tensors: Iterable[torch.Tensor] | None, tracer: Any) -> dict[int, fx.Node]:
    slots: dict[int, Any] = {id(one): get_proxy_slot(one, tracer, None) for one in tensors or ()}
    return {key: slot.proxy.node for key, slot in slots.items() if slot is not None}


class _Differs(BaseException):
    """An operator is not that of the recording. No handler in a model may take it for an error of its own."""


@final
class _Replay:
    """`__torch_dispatch__` of a mode under which a layer is compared with a recording."""

    def __init__(self, recording: Recording, inputs: Mapping[int, torch.Tensor]) -> None:
        self._calls = recording.calls
        self._known = WeakTensorKeyDictionary()
        for one in recording.weights.values():
            self._known[one] = recording.known[id(one)]
        for leaf, one in inputs.items():
            self._known[one] = recording.known[id(recording.inputs[leaf])]
        self.place = 0
        self.differs = False

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that stands for a tensor in the recorded graph."""
        return self._known.get(tensor)

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        call = self._calls[self.place] if self.place < len(self._calls) else None
        if torch._C._is_any_autocast_enabled():  # of which no trace goes on: a trace says what is wrong
            self.refuse()
        if call is None or func is not call.func or not self._same((args, kwargs or {}), call.nodes):
            self.refuse()
        assert call is not None
        self.place += 1
        leaves = _leaves((args, kwargs or {}))
        results = [
            _like(node.meta["val"]) if place is None else leaves[place]
            for node, place in zip(call.results, call.given, strict=True)
        ]
        for result, node in zip(results, call.results, strict=True):
            self._known[result] = node
        return results if call.is_list else results[0]

    def _same(self, given: Any, nodes: Any) -> bool:
        return bool(fx.node.map_aggregate(given, self._described) == fx.node.map_aggregate(nodes, _described))

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _leaf(self._known.get(leaf, _UNKNOWN))
        return _leaf(_number(leaf))

    def refuse(self) -> None:
        """Leave the layer. Raises _Differs."""
        self.differs = True
        raise _Differs


def _like(value: Any) -> Any:
    """A tensor of its own in the memory of `value`, as the views of one tensor are."""
    return fast_detach(value.fake_mode, value)


def _described(leaf: Any) -> Any:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
    return _leaf(_number(value) if isinstance(value, _LENGTHS) else leaf)


def _leaf(value: Any) -> Any:
    """An argument as a value with an equality: 1, 1.0 and True are three."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _number(value: Any) -> Any:
    if not isinstance(value, _LENGTHS):
        return value
    expression = value.node.expr
    return value.node.pytype(expression) if expression.is_number else expression


@final
class _NothingElse(TorchFunctionMode):
    """Refuses what a trace takes note of without an operator."""

    def __init__(self, replay: _Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OTHERS or str(getattr(func, "__module__", "")).startswith("torch._functorch"):
            self._replay.refuse()
        return func(*args, **(kwargs or {}))


def runs_as_recorded(
    recording: Recording, inputs: Mapping[int, torch.Tensor], run: Callable[[], list[torch.Tensor]]
) -> list[fx.Node] | None:
    """Run a layer and say which nodes of the recorded graph its results are; None when it did anything else.

    Args:
        recording: the operators of a trace, complete.
        inputs: the tensors of this run that stand where those of `recording.inputs` do that the trace used.
        run: runs the layer on these and on `recording.weights`; gives its results.
    """
    replay = _Replay(recording, inputs)
    with disable_proxy_modes_tracing():
        mode = ProxyTorchDispatchMode(PythonKeyTracer(), "real", pre_dispatch=True)
        vars(mode)["__torch_dispatch__"] = replay
        vars(mode)["__sym_dispatch__"] = _computed
        try:
            with enable_python_dispatcher(), _NothingElse(replay), mode:
                results = run()
        except _Differs:
            return None
    if replay.differs or replay.place != len(recording.calls):
        return None
    nodes = [replay.node_of(result) for result in results]
    return [node for node in nodes if node is not None] if all(nodes) else None


def _computed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A length, of which nothing is recorded."""
    return func(*args, **kwargs)
