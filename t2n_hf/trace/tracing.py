"""One layer traced by itself, on the fake tensors of the model around it."""

import itertools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree

from t2n_hf.trace.captured import Piece
from t2n_hf.trace.layers import Argument, Arguments, PieceError, layer_index
from t2n_hf.trace.passes.aliases import is_idle_dropout
from t2n_hf.trace.passes.outs import copy_outs
from t2n_hf.trace.piece_by_piece_serialize import kind_and_leaves
from t2n_hf.trace.quick_proxies import quick_proxies
from t2n_hf.trace.quick_results import stand_in
from t2n_hf.trace.replay import Recording, runs_as_recorded
from t2n_hf.trace.swap import buffers_watched, tensors_of, tensors_replaced
from t2n_hf.trace.tree_text import tree_spec_from_name
from t2n_hf.trace.watchers import hooks_left_out, watched_from_outside

__all__ = ["TracedLayer", "is_repeated", "trace_layer"]

_PLAIN: Final = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_MANY: Final = 8  # tensors in a container, more than which not all are given to a trace at first


@dataclass(frozen=True)
class TracedLayer:
    """A traced layer, and how its graph's inputs and results map to the leaves of its arguments and of its result.

    Attributes:
        piece: the graph.
        inputs: leaf of the arguments that each input is.
        results: fake tensors of the graph's results.
        changed: leaf of the arguments that the layer replaces -> number of the result that replaces it.
        returned: for each leaf of the layer's own result ("result", number), ("leaf", leaf of the arguments),
            ("argument", number of an argument that is a container) or ("value", value).
        spec: structure of the layer's own result.
        recording: what the trace did.
    """

    piece: Piece
    inputs: list[int]
    results: list[torch.Tensor]
    changed: dict[int, int]
    returned: list[tuple[str, Any]]
    spec: Any
    recording: Recording

    def rebuild(self, results: list[torch.Tensor], inputs: list[int], arguments: Arguments) -> Any:  # noqa: ANN401
        """Put the layer's result together from the results of a call with these leaves of its arguments."""
        moved = dict(zip(self.inputs, inputs, strict=True))
        sources: dict[str, Callable[[Any], Any]] = {
            "result": results.__getitem__,
            "leaf": lambda leaf: arguments.leaves[moved.get(leaf, leaf)],
            "argument": arguments.values_of(arguments.bound).__getitem__,
            "value": lambda value: value,
        }
        return pytree.tree_unflatten([sources[kind](what) for kind, what in self.returned], self.spec)

    def returns(self, returned: list[tuple[str, Any]], inputs: list[int]) -> bool:
        """Whether another layer, with these leaves of its arguments, whose result is `returned`, gives the same."""
        moved = dict(zip(self.inputs, inputs, strict=True))
        mine = [(kind, moved.get(what, what) if kind == "leaf" else what) for kind, what in self.returned]
        return [(kind, _plain(what)) for kind, what in mine] == [(kind, _plain(what)) for kind, what in returned]

    def state_shift(self, arguments: Arguments, mine: int | None, other: int | None) -> dict[int, int] | None:
        """How far the leaves of the state (a cache) are moved for another layer, by leaf; None if that cannot be told.

        A layer that changes tensors of a container is taken to use that container's part number `layer_idx`: its child
        of that number, or as many leaves as the layer uses where the children are leaves. It is checked that the traced
        layer used nothing else.
        """
        shift: dict[int, int] = {}
        for argument in arguments.arguments:
            if argument.is_leaf:
                continue
            within = range(argument.start, argument.stop)
            used = sorted(leaf for leaf in {*self.inputs, *self.changed} if leaf in within)
            if not any(leaf in within for leaf in self.changed):
                tensors = [leaf for leaf in within if isinstance(arguments.leaves[leaf], torch.Tensor)]
                if used not in ([], tensors):
                    return None  # it chose among them, and another layer may choose otherwise
                continue
            if mine is None or other is None:
                return None
            parts = _parts(argument, len(used))
            if not (mine < len(parts) and other < len(parts) and set(used) <= set(parts[mine])):
                return None
            if len(parts[mine]) != len(parts[other]):
                return None
            shift.update(dict.fromkeys(used, parts[other].start - parts[mine].start))
        return shift


def _plain(what: Any) -> Any:  # noqa: ANN401 - any part of a result, or of an argument
    """A part that is no tensor as a value with an equality: 1, 1.0 and True are three, and lengths are expressions."""
    if isinstance(what, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(what), what.node.expr
    if isinstance(what, float | complex):
        return type(what), repr(what)
    return type(what), what if isinstance(what, _PLAIN) else id(what)


@lru_cache(maxsize=64)
def _parts(argument: Argument, size: int) -> tuple[range, ...]:
    """Leaves of each part of a container; parts are of `size` leaves where its children are leaves."""
    children = tree_spec_from_name(argument.kind)[1].children()
    sizes = [child.num_leaves for child in children]
    if all(child.is_leaf() for child in children):
        sizes = [size] * (len(children) // size)
    ends = itertools.accumulate(sizes, initial=argument.start)
    return tuple(range(start, stop) for start, stop in itertools.pairwise(ends))


@dataclass
class _Run:
    """What one run of the layer showed; filled while it is traced."""

    changed: dict[int, int]
    returned: list[tuple[str, Any]]
    spec: Any = None
    recording: Recording = field(default_factory=Recording)


def is_repeated(
    traced: TracedLayer, layer: nn.Module, arguments: Arguments, inputs: list[int], changed: list[int]
) -> bool:
    """Run another layer of a kind, and say whether it does what the traced one did; False also if that cannot be told.

    Args:
        traced: the first layer of the kind.
        layer: another one, with equal parts.
        arguments: what it is called with, as `trace_layer` takes them.
        inputs: the leaves of `arguments` that stand where `traced.inputs` do.
        changed: those that stand where `traced.changed` do.
    """
    if not traced.recording.complete:
        return False
    run = _Run({}, [])

    def again() -> list[torch.Tensor]:
        with tensors_replaced(layer, traced.recording.weights), buffers_watched(layer):
            return _run_layer(layer, arguments, {}, run)

    moved = dict(zip(traced.inputs, inputs, strict=True))
    given = {leaf: arguments.leaves[other] for leaf, other in moved.items()}
    try:
        nodes = runs_as_recorded(traced.recording, given, again)
    except Exception:  # noqa: BLE001 - a trace of it says what is wrong, if it is not the lack of one
        return False
    return (
        nodes == [node for node, _ in traced.piece.outputs]
        and run.changed == dict(zip(changed, traced.changed.values(), strict=True))
        and traced.returns(run.returned, inputs)
        and run.spec == traced.spec
    )


def trace_layer(layer: nn.Module, arguments: Arguments, where: str, name: str) -> TracedLayer:
    """Trace a layer called with `arguments`, whose tensors are fakes of the trace that is going on around it.

    Raises:
        PieceError: the layer has effects that its results do not show, or cannot be traced by itself.
    """
    places = [at for at, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)]
    likely = _likely_places(places, layer, arguments)
    if len(likely) < len(places):
        try:
            traced = _traced_with(likely, layer, arguments, where, name)
        except PieceError:
            traced = None  # it needs the others, or would fail with them too
        left_out = {id(arguments.leaves[at]) for at in set(places) - set(likely)}
        if traced is not None and not any(id(held) in left_out for held in traced.piece.constants.values()):
            return traced
    return _traced_with(places, layer, arguments, where, name)


def _likely_places(places: list[int], layer: nn.Module, arguments: Arguments) -> list[int]:
    """The leaves that the layer will use, if it uses its own part of a cache that has a part for each layer.

    That is a child of the cache, or a key and a value where the children are leaves.

    To trace a layer takes time for each tensor that it is given; a tensor that is left out and used after all is seen.
    """
    index = layer_index(layer)
    left_out: set[int] = set()
    for argument in arguments.arguments:
        if argument.is_leaf or index is None or argument.stop - argument.start <= _MANY:
            continue
        parts = _parts(argument, 2)
        if index < len(parts):
            left_out |= set(range(argument.start, argument.stop)) - set(parts[index])
    return [at for at in places if at not in left_out]


def _traced_with(places: list[int], layer: nn.Module, arguments: Arguments, where: str, name: str) -> TracedLayer:
    """Trace the layer with these leaves of its arguments as inputs of the graph."""
    mode = detect_fake_mode([arguments.leaves[at] for at in places])
    if mode is None:
        raise PieceError(f"{where} is called without a traced tensor")
    own = tensors_of(layer)
    run = _Run({}, [])

    def body(weights: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        inputs = dict(zip(places, tensors, strict=True))
        run.recording.begin(weights, inputs)
        with quick_proxies(run.recording), tensors_replaced(layer, weights), buffers_watched(layer):
            return _run_layer(layer, arguments, inputs, run)

    body._orig_mod = layer  # type: ignore[attr-defined] # make_fx records the module stack relative to it
    with disable_proxy_modes_tracing():
        fakes: dict[int, torch.Tensor] = {}
        for tensor in own.values():
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _weight(tensor, mode)
        weights = {name: fakes[id(tensor)] for name, tensor in own.items()}
        try:
            tracer = make_fx(body, pre_dispatch=True, record_module_stack=True, _allow_non_fake_inputs=True)
            traced = tracer(weights, [arguments.leaves[at] for at in places])
        except PieceError:
            raise
        except Exception as error:
            raise PieceError(f"{where} cannot be traced by itself: {type(error).__name__}: {error}") from error
    piece = Piece(
        graph=traced.graph, inputs=[], outputs=[], weights={}, constants={}, constant_names={}, name=name, where=where
    )
    return _read_trace(traced, own, arguments, places, run, piece)


def _weight(tensor: torch.Tensor, mode: Any) -> torch.Tensor:  # noqa: ANN401 - torch's fake mode
    """A weight, or its stand-in, as a tensor of the trace that is going on."""
    if type(tensor) is FakeTensor and tensor.is_contiguous():
        return stand_in(tensor, mode)
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


def _run_layer(
    layer: nn.Module, arguments: Arguments, tensors: dict[int, torch.Tensor], run: _Run
) -> list[torch.Tensor]:
    """Run the layer on fresh containers, and sort out what is new in them and in its result."""
    leaves = [tensors.get(at, leaf) for at, leaf in enumerate(arguments.leaves)]
    call = arguments.rebuilt(leaves)
    with hooks_left_out(layer) if watched_from_outside(layer) else nullcontext():
        result = layer(*call.args, **call.kwargs)
    after, kinds = _flatten_all(arguments.values_of(call))
    if kinds != [argument.kind for argument in arguments.arguments]:
        raise PieceError("it changes the structure of its arguments")
    news: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number(tensor: torch.Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(news)
            news.append(tensor)
        return numbers[id(tensor)]

    values = arguments.values_of(call)
    containers = {id(v): n for n, (v, a) in enumerate(zip(values, arguments.arguments, strict=True)) if not a.is_leaf}
    flat, run.spec = pytree.tree_flatten(result, is_leaf=lambda node: id(node) in containers)
    given = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    for leaf in flat:
        if id(leaf) in containers:
            run.returned.append(("argument", containers[id(leaf)]))
        elif not isinstance(leaf, torch.Tensor):
            run.returned.append(("value", leaf))
        elif id(leaf) in given:
            run.returned.append(("leaf", given[id(leaf)]))
        else:
            run.returned.append(("result", number(leaf)))
    for at, (old, new) in enumerate(zip(leaves, after, strict=True)):
        if new is not old and isinstance(new, torch.Tensor):
            run.changed[at] = number(new)
    _refuse_changed_values(arguments, values, leaves, after)
    return news


def _refuse_changed_values(arguments: Arguments, values: list[Any], before: list[Any], after: list[Any]) -> None:
    for argument, value in zip(arguments.arguments, values, strict=True):
        if not isinstance(value, list | dict):  # what a cache counts it knows without its layers
            continue
        for old, new in zip(before[argument.start : argument.stop], after[argument.start : argument.stop], strict=True):
            if new is not old and not isinstance(new, torch.Tensor) and _plain(new) != _plain(old):
                raise PieceError(f"it changes {old!r} in its argument {argument.name!r} to {new!r}")


def _flatten_all(values: list[Any]) -> tuple[list[Any], list[str]]:
    pairs = [kind_and_leaves(value, "an argument") for value in values]
    return [leaf for _, leaves in pairs for leaf in leaves], [kind for kind, _ in pairs]


def _refuse_effects(graph: fx.Graph, placeholders: list[fx.Node]) -> None:
    """Raise PieceError when an operator writes into an input or a weight, or into a view of one."""
    roots = set(placeholders)
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target is operator.getitem and node.args[0] in roots:
            roots.add(node)
        if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        first = schema.arguments[0].alias_info if schema.arguments else None
        if node.args[0] not in roots or (first is None and not is_idle_dropout(node)):
            continue
        if first is not None and first.is_write and not is_idle_dropout(node):
            raise PieceError(f"{node.target} in it changes a tensor in place that comes from outside")
        roots.add(node)


def _keep(piece: Piece, node: fx.Node, value: torch.Tensor, name: str) -> None:
    piece.constants[node], piece.constant_names[node] = value, f"{piece.where}.{name}"


def _read_trace(
    traced: fx.GraphModule,
    own: dict[str, torch.Tensor],
    arguments: Arguments,
    places: list[int],
    run: _Run,
    piece: Piece,
) -> TracedLayer:
    graph = piece.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(own) + len(places):
        raise PieceError("its trace has other inputs than its weights and arguments")
    copy_outs(graph)
    _refuse_effects(graph, placeholders)
    inputs: list[int] = []
    for node, (name, tensor) in zip(placeholders, own.items(), strict=False):
        if not node.users:
            graph.erase_node(node)
        elif isinstance(tensor, FakeTensor):
            piece.weights[node] = name
        else:
            _keep(piece, node, tensor, name)
    for node, at in zip(placeholders[len(own) :], places, strict=True):
        if node.users:
            piece.inputs.append((node, arguments.leaf_name(at)))
            inputs.append(at)
        else:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "get_attr":
            _keep(piece, node, getattr(traced, node.target), _made_in(node))
    nodes = next(node for node in graph.nodes if node.op == "output").args[0]
    if not all(isinstance(node, fx.Node) for node in nodes):
        raise PieceError("a result of it is no tensor of its trace")
    names = _result_names(arguments, run)
    piece.outputs.extend((node, names[n]) for n, node in enumerate(nodes))
    results = [node.meta["val"] for node in nodes]
    return TracedLayer(piece, inputs, results, run.changed, run.returned, run.spec, run.recording)


def _made_in(node: fx.Node) -> str:
    """Name of a constant within the layer, by the module that makes it."""
    module, _kind = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())[-1]
    return f"{module}.{node.target}" if module else str(node.target)


def _result_names(arguments: Arguments, run: _Run) -> dict[int, str]:
    names = {n: f"{arguments.leaf_name(at)}_out" for at, n in run.changed.items()}
    plain = list(dict.fromkeys(n for kind, n in run.returned if kind == "result" and n not in names))
    return names | {n: "output" if len(plain) == 1 else f"output_{at}" for at, n in enumerate(plain)}
