"""Calls of layers that torch.export does not see one by one: they become nodes of the graph when it is done.

torch.export walks through its graph a dozen times, and proves and copies what it finds: a layer costs time there
although its call is like that of the layer before. So a *run* of calls, one after the other with nothing else between
them, is kept beside the graph. Results of such calls are tensors as any others. Where something of the graph is
computed from one of them, a node stands for that result, at the place of the run and with all that the run takes from
the graph; a result that is only an output of the model is left out of the outputs. Afterwards the calls are put where
they were made, and the outputs in their places: the graph is as if each call had been a node all the time.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_slot

from t2n_hf.trace.direct_call import SeenCall, traced_by

__all__ = ["LATE_OP", "LateCalls", "LateError", "inputs_like", "outputs_left_out"]


@torch.library.custom_op("t2n_hf::late", mutates_args=(), tags=torch.Tag.flexible_layout)
def _late(run: int, call: int, place: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    raise RuntimeError("t2n_hf::late stands for a layer's result while a model is captured; it cannot be executed")


LATE_OP: Final = torch.ops.t2n_hf.late.default


class LateError(Exception):
    """The graph that torch.export gave does not have what calls are to be put back at; the text says what."""


class _Slot(_ProxyTensor, ABC):
    """What a tracer knows a tensor by, whose node is made when something asks for it."""

    def __init__(self) -> None:
        self.constant = None
        self._made: fx.Proxy | None = None

    @property
    def proxy(self) -> fx.Proxy:  # type: ignore[override] # a field of torch's
        """The proxy of its node."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def is_node(self) -> bool:
        """Whether it has a node."""
        return self._made is not None

    # Two tensors are two, whatever is known of them; torch's class compares what it holds, which would make nodes.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @abstractmethod
    def _make(self) -> fx.Proxy:
        """Make the node."""


@final
class _Input(_Slot):
    """One of the inputs that are made alike: item `place` of `call`; `number` says which of all inputs it is."""

    def __init__(self, tracer: Any, call: fx.Node, place: int, number: int) -> None:  # noqa: ANN401 - torch's tracer
        super().__init__()
        self._tracer, self._call, self._place, self.number = tracer, call, place, number

    def _make(self) -> fx.Proxy:
        (value,) = self._call.meta["val"]
        return _made_after(self._call, self._tracer, operator.getitem, (self._call, self._place), value)


@final
class _Result(_Slot):
    """Result `place` of a call."""

    def __init__(self, run: "_Run", call: int, place: int) -> None:
        super().__init__()
        self.run, self.call, self.place = run, call, place

    def _make(self) -> fx.Proxy:
        return self.run.demand(self)


def _made_after(
    anchor: fx.Node,
    tracer: Any,  # noqa: ANN401 - torch's tracer
    target: Any,  # noqa: ANN401 - what fx calls
    args: tuple[Any, ...],
    value: Any,  # noqa: ANN401 - a tensor, or a list
) -> fx.Proxy:
    recorded, tracer.record_stack_traces = tracer.record_stack_traces, False
    try:
        with torch._C.DisableTorchFunction(), tracer.graph.inserting_after(anchor):
            node = tracer.create_node("call_function", target, args, {})
            node.meta["val"] = value
    finally:
        tracer.record_stack_traces = recorded
    return fx.Proxy(node, tracer)


@dataclass(frozen=True)
class _LateCall:
    """`target(number, tensors)`; each tensor is another slot, or the place of a node in what the run takes."""

    target: Any
    number: int
    tensors: list[_Slot | int]
    seen: SeenCall


@dataclass
class _Run:
    """Calls with nothing between them. `given` are the nodes that they take, in order; `anchor` precedes them."""

    number: int
    owner: "LateCalls"
    anchor: fx.Node
    calls: list[_LateCall] = field(default_factory=list)
    given: dict[fx.Node, int] = field(default_factory=dict)
    results: list[list[_Result]] = field(default_factory=list)
    demanded: bool = False

    def is_open(self) -> bool:
        """Whether nothing was put into the graph since the run began."""
        return not self.demanded and _last_node(self.owner.tracer.graph) is self.anchor

    def demand(self, result: _Result) -> fx.Proxy:
        """Make a node that stands for a result."""
        self.demanded = True
        call = self.calls[result.call]
        args = (self.number, result.call, result.place, list(self.given))
        return _made_after(self.anchor, self.owner.tracer, LATE_OP, args, call.seen.results[result.place])


def _last_node(graph: fx.Graph) -> fx.Node:
    return graph._root.prev


@final
@dataclass
class LateCalls:
    """The runs of one trace. `first` is the number of its first run; no two traces have runs of one number."""

    tracer: Any
    first: int = 0
    runs: list[_Run] = field(default_factory=list)
    outputs: dict[int, _Result] = field(default_factory=dict)

    def call(self, seen: SeenCall, target: Any, number: int, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401
        """Note `target(number, tensors)`, whose results are like those of `seen`; gives these.

        None when that has to be a node at once, because a tensor is not known to the tracer.
        """
        slots: list[Any] = [get_proxy_slot(tensor, self.tracer, None) for tensor in tensors]
        if not all(isinstance(slot, _ProxyTensor) and slot.constant is None for slot in slots):
            return None
        run = self._run()
        given: list[_Slot | int] = []
        for slot in slots:
            if isinstance(slot, _Input) or (isinstance(slot, _Result) and slot.run is run):
                given.append(slot)
            else:
                given.append(run.given.setdefault(slot.proxy.node, len(run.given)))
        run.calls.append(_LateCall(target, number, given, seen))
        at = len(run.calls) - 1
        results, fresh = [], seen.fresh()
        for place, tensor in enumerate(fresh):
            slot = _Result(run, at, place)
            self.tracer.tensor_tracker[tensor] = slot
            results.append(slot)
        run.results.append(results)
        return fresh

    @property
    def next(self) -> int:
        """Number of the first run of another trace."""
        return self.first + len(self.runs)

    def _run(self) -> _Run:
        if not self.runs or not self.runs[-1].is_open():
            anchor = _last_node(self.tracer.graph)
            self.runs.append(_Run(self.next, self, anchor))
        return self.runs[-1]

    def restored(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        """Put the calls, and the outputs that were left out, into the graph that torch.export gave, in place.

        Args:
            graph: that graph.
            inputs: its nodes of all inputs of the model, in order.

        Raises:
            LateError: the graph has no place for them.
        """
        found: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.target is LATE_OP:
                found.setdefault(node.args[0], []).append(node)
        made: dict[_Slot, fx.Node] = {}
        runs = {run.number: run for run in self.runs}
        for number, nodes in found.items():
            if number not in runs:
                raise LateError(f"run {number} is of another trace")
            self._restore(graph, runs[number], nodes, inputs, made)
        self._restore_outputs(graph, made)
        # They hold each other, and Python would look for them among all that a capture makes.
        self.runs.clear()

    def _restore(
        self, graph: fx.Graph, run: _Run, nodes: list[fx.Node], inputs: Sequence[fx.Node], made: dict[_Slot, fx.Node]
    ) -> None:
        given: Any = nodes[0].args[3]
        if any(node.args[3] != given for node in nodes) or len(given) != len(run.given):
            raise LateError(f"results of run {run.number} are given other tensors than its calls")

        def node_of(tensor: _Slot | int) -> fx.Node:
            if isinstance(tensor, int):
                source: fx.Node = given[tensor]
                return source
            return inputs[tensor.number] if isinstance(tensor, _Input) else made[tensor]

        meta = {key: value for key, value in nodes[0].meta.items() if key != "val"}
        with graph.inserting_before(nodes[0]):
            for call, results in zip(run.calls, run.results, strict=True):
                node = graph.call_function(call.target, (call.number, [node_of(tensor) for tensor in call.tensors]))
                node.meta = {**meta, "val": list(call.seen.results)}
                for result, value in zip(results, call.seen.results, strict=True):
                    made[result] = item = graph.call_function(operator.getitem, (node, result.place))
                    item.meta = {**meta, "val": value}
        for node in nodes:
            at, place = node.args[1:3]
            node.replace_all_uses_with(made[run.results[at][place]])  # type: ignore[index]
            graph.erase_node(node)

    def _restore_outputs(self, graph: fx.Graph, made: dict[_Slot, fx.Node]) -> None:
        if not self.outputs:
            return
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        lost = [place for place, slot in self.outputs.items() if slot not in made]
        if lost:
            raise LateError(f"outputs {lost} come from calls that nothing in the graph depends on")
        kept: Any = output.args[0]
        rest = list(kept)
        for place in sorted(self.outputs):
            rest.insert(place, made[self.outputs[place]])
        output.args = (type(kept)(rest),)


def inputs_like(
    seen: SeenCall,
    target: Any,  # noqa: ANN401 - what fx calls
    first: torch.Tensor,
    numbers: Sequence[int],
) -> list[torch.Tensor] | None:
    """Record `target(first, len(numbers))`, whose results are like the one of `seen` and stand for inputs.

    A result is a node when something asks for it. None when the call has to go through the dispatcher.
    """
    tracer = traced_by()
    if tracer is None or tracer is not seen.tracer or not seen.is_fake:
        return None
    source: Any = get_proxy_slot(first, tracer, None)
    if source is None:
        return None
    args = (source.proxy.node, len(numbers))
    # torch looks through all that a node gives, and these are one.
    call = _made_after(_last_node(tracer.graph), tracer, target, args, list(seen.results)).node
    tensors = seen.repeated(len(numbers)).fresh()
    for place, (number, tensor) in enumerate(zip(numbers, tensors, strict=True)):
        tracer.tensor_tracker[tensor] = _Input(tracer, call, place, number)
    return tensors


def outputs_left_out(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a trace without those that are results of late calls, which are noted where the calls are.

    Of each run the first such output stays, so that the graph depends on it.
    """
    tracer = traced_by()
    if tracer is None:
        return list(results)
    slots = [get_proxy_slot(result, tracer, None) for result in results]
    late = {place: slot for place, slot in enumerate(slots) if isinstance(slot, _Result) and not slot.is_node}
    stay = {slot.run.number: place for place, slot in reversed(late.items())}
    gone = {place: slot for place, slot in late.items() if place not in stay.values()}
    for slot in gone.values():
        slot.run.owner.outputs = gone
    kept = [result for place, result in enumerate(results) if place not in gone]
    _forget(tracer, kept)
    return kept


def _forget(tracer: Any, kept: Sequence[torch.Tensor]) -> None:  # noqa: ANN401 - torch's tracer
    """Have the tracer not know what has no node, as it asks in the end for the node of every tensor that is left."""
    needed = {id(tensor) for tensor in kept}
    for tensor, slot in list(tracer.tensor_tracker.items()):
        if isinstance(slot, _Slot) and not slot.is_node and id(tensor) not in needed:
            del tracer.tensor_tracker[tensor]
