"""One run over the captured graphs, with fixed formats of the weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sympy
import torch
from torch import fx

from t2n_hf.errors import EmitError
from t2n_hf.export.fragments import FragmentPlan, plan_fragment
from t2n_hf.export.lowered import Lowered, WeightBinding, WeightFormatInfo
from t2n_hf.export.nesting import nested
from t2n_hf.nnef.ir import Assign, Document, External, Fragment, Name, Variable
from t2n_hf.nnef.names import OPERATORS, Namer
from t2n_hf.ops.bodies import Bodies
from t2n_hf.ops.dims import Shape, dims
from t2n_hf.ops.emit import Emit, EmitOptions, python_name
from t2n_hf.ops.table import EmitterTable
from t2n_hf.ops.value import ComplexValue, Value, renamed, tensors_in, tract_dtype
from t2n_hf.trace.captured import Captured, CapturedGraph, Piece, PieceCall
from t2n_hf.trace.pieces import LAYER_OP

__all__ = ["Lowering"]

_DENSE: Final = WeightFormatInfo()


def _stored_shape(shape: tuple[int, ...], info: WeightFormatInfo) -> tuple[int, ...]:
    """Shape of a `.dat`: tract reads block formats of rank 2, so that a stack of matrices has one row for each."""
    stored = (*shape[:-2], shape[-1], shape[-2]) if info.transposed else shape
    return (stored[0], math.prod(stored[1:])) if info.format != "dense" and len(stored) > 2 else stored


@dataclass(frozen=True)
class _Written:
    """A fragment, and the weights (by their names in the layer) whose block format it cannot use."""

    fragment: Fragment
    dense: dict[str, str]


@dataclass
class Lowering:
    """Writes the document. Afterwards `forced_dense` says which weights cannot have their block format, and why.

    Args:
        captured: the graphs.
        table: emitters.
        formats: block formats by canonical name.
        canonical: name of a weight -> the name it is written under.
        options: what emitters may choose.
        flat: write layers in place.
    """

    captured: Captured
    table: EmitterTable
    formats: Mapping[str, WeightFormatInfo]
    canonical: Mapping[str, str]
    options: EmitOptions
    flat: bool
    forced_dense: dict[str, str] = field(default_factory=dict)
    _bindings: dict[str, WeightBinding] = field(default_factory=dict)
    _written: dict[Any, _Written] = field(default_factory=dict)
    _plans: dict[int, FragmentPlan] = field(default_factory=dict)
    _shared: dict[Any, dict[fx.Node, Any]] = field(default_factory=dict)
    _kinds: dict[fx.Node, tuple[Shape, torch.dtype]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reserve the names that are given from outside."""
        graph = self.captured
        self._symbols = {symbol: sympy.Symbol(name, integer=True) for symbol, name in graph.symbols.items()}
        self._namer = Namer([*graph.symbols.values(), *(name for _, name in (*graph.inputs, *graph.outputs))])
        self._fragment_namer = Namer(OPERATORS)
        self._bodies = Bodies(self._fragment_namer, graph.symbols.values())
        self._emit = self._new_emit(self._namer)

    def _new_emit(self, namer: Namer) -> Emit:
        return Emit(self.table.extended({LAYER_OP: self._layer}), namer, self._symbols, self.options, self._bodies)

    def run(self, properties: Mapping[str, str], reasons: Mapping[str, str]) -> Lowered:
        """Write everything, once; `reasons` says why weights are dense that have a block format."""
        graph, emit = self.captured, self._emit
        for node, name in graph.inputs:
            emit.env[node] = self._given(node, name)
        inputs = [emit.env[node] for node, _ in graph.inputs]
        self._store(graph, emit.env)
        emit.final_names = _final_names(graph.outputs, emit.env)
        emit.run(graph.graph.nodes)
        emit.write_outputs(graph.outputs)
        self._force({b.name: b.fqn for b in self._bindings.values() if b.fqn is not None}, emit.forced_dense)
        bindings = list(self._bindings.values())
        if reasons:
            bindings = [replace(binding, reason=reasons.get(binding.fqn or "")) for binding in bindings]
        layers = {id(written.fragment): written.fragment for written in self._written.values()}
        fragments = (*self._bodies.fragments(), *layers.values())
        shapes = {shape: tuple(dims(shape)) for shape in dict.fromkeys(value.shape for value in inputs)}
        document = Document(
            inputs=tuple(External(v.name.text, tract_dtype(v.dtype), shapes[v.shape]) for v in inputs),
            outputs=tuple(name for _, name in graph.outputs),
            variables=tuple(Variable(b.name, b.label, b.shape) for b in bindings),
            body=nested(emit.body, {b.name for b in bindings}, [name for _, name in graph.outputs]),
            fragments=fragments,
            extensions=_extensions([emit.body, *(fragment.body for fragment in fragments)]),
            symbols=tuple(dict.fromkeys(graph.symbols.values())),
            asserts=tuple(graph.asserts),
            properties=dict(properties),
        )
        del self._emit  # which calls this object for layers: they would hold each other
        return Lowered(document, bindings)

    def _force(self, names: Mapping[str, str], dense: Mapping[str, str]) -> None:
        for name, why in dense.items():
            self.forced_dense.setdefault(names[name], why)

    # Values that a graph starts from

    def _given(self, node: fx.Node, name: str, info: WeightFormatInfo = _DENSE) -> Value:
        if node not in self._kinds:  # those of a layer's graph are given for each layer
            fake = node.meta["val"]
            if fake.dtype.is_complex:
                what = f"{name or node.name} of {fake.dtype} {tuple(fake.shape)}"
                raise EmitError(f"{what}: an archive has no complex numbers; take and give view_as_real() of them")
            self._kinds[node] = self._emit.shape_of(fake), self._emit.float_type(fake.dtype)
        block = None if info.format == "dense" else info.format
        return Value(Name(name), *self._kinds[node], block, info.transposed)

    def _store(self, graph: CapturedGraph, env: dict[fx.Node, Any], prefix: str = "") -> None:
        """Make variables of a graph's weights and constants."""
        for node, name in graph.weights.items():
            env[node] = self._weight(node, f"{prefix}{name}")
        for node in graph.constants:
            env[node] = self._constant(graph, node)

    def _weight(self, node: fx.Node, name: str) -> Value:
        fqn = self.canonical.get(name, name)
        info = self.formats.get(fqn, _DENSE)
        if fqn in self._bindings:
            return self._given(node, self._bindings[fqn].name, info)
        value = self._given(node, self._namer.unique(fqn), info)
        self._bindings[fqn] = WeightBinding(
            label=fqn,
            name=value.name.text,
            fqn=fqn,
            shape=_stored_shape(tuple(map(int, value.shape)), info),
            format=info.format,
            transposed=info.transposed,
        )
        return value

    def _constant(self, graph: CapturedGraph, node: fx.Node) -> Any:  # noqa: ANN401 - a value, or a number
        tensor = graph.constants[node].detach()
        if not tensor.is_complex():
            tensor = tensor.to(self._emit.float_type(tensor.dtype))
        if tensor.ndim == 0:
            return tensor.item()
        label = graph.constant_names[node]
        if tensor.is_complex():
            return ComplexValue(
                self._variable(f"{label}.real", tensor.real.contiguous()),
                self._variable(f"{label}.imag", tensor.imag.contiguous()),
            )
        return self._variable(label, tensor)

    def _variable(self, label: str, tensor: torch.Tensor) -> Value:
        key = f"constant {label}"
        shape = tuple(tensor.shape)
        if key not in self._bindings:
            name = self._namer.unique(label)
            self._bindings[key] = WeightBinding(label=label, name=name, fqn=None, shape=shape, value=tensor)
        return Value(Name(self._bindings[key].name), shape, tensor.dtype, known=True, filled=True)

    # Layers

    def _layer(self, emit: Emit, number: int, tensors: list[Value]) -> list[Value]:
        """Write one layer: the call of its fragment, which is written with the first layer that needs it."""
        call = self.captured.calls[number]
        piece = self.captured.pieces[call.piece]
        env: dict[fx.Node, Any] = {node: value for (node, _), value in zip(piece.inputs, tensors, strict=True)}
        self._store(piece, env, call.prefix)
        names = self._result_names(emit.node, call)
        if self.flat:
            return self._inline(piece, env, names)
        env |= self._hoist(emit.node, call.piece, env)
        plan = self._plan(call.piece)
        fragment = self._fragment(call, plan, env)
        values = [env[node] for node in plan.parameters]
        arguments = tuple(part.name for value in values for part in tensors_in(value))
        emit.body.append(Assign(tuple(names), fragment.name, arguments))
        results = [node for node, _ in piece.outputs]
        return [self._given(node, name) for node, name in zip(results, names, strict=True)]

    def _result_names(self, node: fx.Node, call: PieceCall) -> list[str]:
        """Names for a layer's results: those of the graph's outputs where they are outputs."""
        final = {user.args[1]: self._emit.final_names.get(user) for user in node.users}
        layer = "_".join(call.prefix.rstrip(".").split(".")[-2:])
        names = []
        for place, (_, name) in enumerate(self.captured.pieces[call.piece].outputs):
            base = layer if name == "output" else f"{layer}_{name}"
            names.append(final.get(place) or self._namer.unique(base))
        return names

    def _inline(self, piece: Piece, env: dict[fx.Node, Any], names: list[str]) -> list[Value]:
        """Write a layer in place."""
        emit, outside = self._emit, (self._emit.env, self._emit.final_names)
        outputs = [(node, name) for (node, _), name in zip(piece.outputs, names, strict=True)]
        emit.env, emit.final_names = env, _final_names(outputs, env)
        emit.run(piece.graph.nodes)
        emit.write_outputs(outputs)
        results = [replace(env[node], name=Name(name)) for node, name in outputs]
        emit.env, emit.final_names = outside
        return results

    def _plan(self, number: int) -> FragmentPlan:
        if number not in self._plans:
            self._plans[number] = plan_fragment(self.captured, number)
        return self._plans[number]

    def _hoist(self, node: fx.Node, number: int, env: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """What the layer at this call shares with others; written with the first layer that is given the same."""
        plan, piece = self._plan(number), self.captured.pieces[number]
        key = (number, *(node.args[1][place] for place in plan.shared))  # type: ignore[index]
        if key not in self._shared:
            start = {piece.inputs[place][0]: env[piece.inputs[place][0]] for place in plan.shared}
            outside, self._emit.env = self._emit.env, {**env, **start}
            self._emit.run(plan.hoisted)
            self._shared[key] = {hoisted: self._emit.env[hoisted] for hoisted in plan.hoisted}
            self._emit.env = outside
        return self._shared[key]

    def _fragment(self, call: PieceCall, plan: FragmentPlan, env: Mapping[fx.Node, Any]) -> Fragment:
        """The fragment for layers of this kind with weights in these formats."""
        piece = self.captured.pieces[call.piece]
        formats = [(env[node].block, env[node].transposed) for node in piece.weights]
        numbers = [env[node] for node in plan.parameters if not tensors_in(env[node])]
        key = (call.piece, *formats, repr(numbers))
        if key not in self._written:
            self._written[key] = self._write_fragment(piece, plan, env)
        written = self._written[key]
        names = {name: self.canonical.get(call.prefix + name, call.prefix + name) for name in written.dense}
        self._force(names, written.dense)
        return written.fragment

    def _write_fragment(self, piece: Piece, plan: FragmentPlan, env: Mapping[fx.Node, Any]) -> _Written:
        results = [name for _, name in piece.outputs]
        namer = Namer([*self.captured.symbols.values(), *results])
        emit = self._new_emit(namer)
        stems = {**dict(piece.inputs), **piece.weights, **_leaf_names(piece)}
        parameters: dict[str, fx.Node] = {}
        for node in plan.parameters:
            start = env[node]
            stem = stems.get(node) or python_name(node)
            names = [namer.unique(stem) for _ in tensors_in(start)]
            parameters.update(dict.fromkeys(names, node))
            emit.env[node] = renamed(start, names)
        emit.final_names = _final_names(piece.outputs, emit.env)
        outside = set(plan.hoisted)
        emit.run(node for node in piece.graph.nodes if node not in outside)
        emit.write_outputs(piece.outputs)
        dense = {piece.weights[parameters[name]]: why for name, why in emit.forced_dense.items()}
        stored = {name for name, node in parameters.items() if node in piece.weights or node in piece.constants}
        body = nested(emit.body, stored, results)
        fragment = Fragment(piece.name, tuple(parameters), tuple(results), body)
        return _Written(self._named_once(piece, fragment), dense)

    def _named_once(self, piece: Piece, fragment: Fragment) -> Fragment:
        """The same fragment under a name of its own; formats that give the same text share one."""
        for written in self._written.values():
            if replace(written.fragment, name=fragment.name) == fragment:
                return written.fragment
        return replace(fragment, name=self._fragment_namer.unique(_not_of_tract(piece.name)))


def _not_of_tract(name: str) -> str:
    return f"_{name}" if name.startswith("tract_") else name


def _leaf_names(piece: Piece) -> dict[fx.Node, str]:
    return {node: name.removeprefix(f"{piece.where}.") for node, name in piece.constant_names.items()}


def _final_names(outputs: Iterable[tuple[fx.Node, str]], given: Mapping[fx.Node, Any]) -> dict[fx.Node, str]:
    """The first name of each output that is written, not given."""
    names: dict[fx.Node, str] = {}
    for node, name in outputs:
        if node not in given:
            names.setdefault(node, name)
    return names


def _extensions(bodies: Iterable[Iterable[Assign]]) -> tuple[str, ...]:
    used = any(assign.op.startswith("tract_transformers_") for body in bodies for assign in body)
    return ("tract_registry tract_transformers",) if used else ()
