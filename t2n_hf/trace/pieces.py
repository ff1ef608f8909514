"""Repeated layers, each kind traced once: in the graph of the model a layer is one call of `t2n_hf::layer`.

While the model is traced, its layers are replaced by stand-ins. A stand-in binds its arguments as the layer would,
finds a kind that is equal to it in everything that a trace depends on, or traces the layer there and then, on the very
fake tensors that the model passes it. So a piece has the symbols of the model, and a layer costs one call, which
torch.export sees for the first layer of a kind only (`late_calls`). The second one is traced as well: its graph must be
the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, final

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensor

from t2n_hf.trace.captured import Piece, PieceCall
from t2n_hf.trace.direct_call import SeenCall, seen_call, traced_by
from t2n_hf.trace.late_calls import LateCalls
from t2n_hf.trace.layers import (
    Arguments,
    PieceError,
    bind,
    describe_layer,
    layer_index,
    may_count,
    piece_name,
    shape_of,
)
from t2n_hf.trace.same_graph import describe_piece
from t2n_hf.trace.tracing import TracedLayer, is_repeated, trace_layer
from t2n_hf.trace.walk import modules_of
from t2n_hf.trace.watchers import watched_from_outside

__all__ = ["LAYER_OP", "PieceRecorder", "is_library_code"]


@torch.library.custom_op("t2n_hf::layer", mutates_args=(), tags=torch.Tag.flexible_layout)
def _layer(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("t2n_hf::layer stands for a layer while a model is captured; it cannot be executed")


@_layer.register_fake
def _(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return _RECORDER.get().results(call)


LAYER_OP: Final = torch.ops.t2n_hf.layer.default
_SET_BY_TORCH: Final = frozenset({"_forward_hooks", "_forward_hooks_with_kwargs", "training"})
_RECORDER: ContextVar["PieceRecorder"] = ContextVar("t2n_hf_piece_recorder")


@final
class _StandIn(nn.Module):
    """Takes the place of a layer in its ModuleList. The class and attributes that a model reads are the layer's."""

    def __init__(self, layer: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: the outer graph must not see its weights
        self.__dict__["call"] = call
        if watched_from_outside(layer):
            self._forward_hooks = layer._forward_hooks
            self._forward_hooks_with_kwargs = layer._forward_hooks_with_kwargs
        self.training = layer.training

    @property  # type: ignore[misc] # isinstance asks for it
    def __class__(self) -> type:
        return type(self.__dict__["layer"]) if "layer" in self.__dict__ else _StandIn

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever the model sets
        if name not in _SET_BY_TORCH:
            raise PieceError(f"the model sets attribute {name!r} of a {type(self.__dict__['layer']).__name__}")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the layer has
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes and gives
        """Record a call of the layer."""
        return self.__dict__["call"](args, kwargs)


@dataclass(frozen=True)
class _Kind:
    """A traced layer and all that another layer must share with it."""

    description: Any
    surroundings: Any
    index: int | None
    arguments: Arguments
    traced: TracedLayer

    def leaves_for(self, arguments: Arguments, index: int | None) -> tuple[list[int], list[int]] | None:
        """Leaves of another layer's arguments that are this kind's inputs, and those it changes; None if unlike."""
        shift = self.traced.state_shift(self.arguments, self.index, index)
        if shift is None or not arguments.alike(self.arguments):
            return None
        inputs = [leaf + shift.get(leaf, 0) for leaf in self.traced.inputs]
        changed = [leaf + shift.get(leaf, 0) for leaf in self.traced.changed]
        if not all(0 <= leaf < len(arguments.leaves) for leaf in (*inputs, *changed)):
            return None
        if any(arguments.leaves[one] is not arguments.leaves[other] for one, other in self._twins):
            return None
        with torch._C.DisableTorchFunction():  # the modes of the trace would see each shape that is asked for
            for mine, other in zip(self.traced.inputs, inputs, strict=True):
                known, leaf = self.arguments.leaves[mine], arguments.leaves[other]
                if leaf is not known and shape_of(leaf) != self._shapes[mine]:
                    return None
        return inputs, changed

    @cached_property
    def _twins(self) -> list[tuple[int, int]]:
        """Leaves that are one tensor, for which the trace has one input; another layer may be given two."""
        places: dict[int, int] = {}
        leaves = self.arguments.leaves
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return [(one, at) for at in tensors if (one := places.setdefault(id(leaves[at]), at)) != at]

    @cached_property
    def _shapes(self) -> dict[int, Any]:
        return {leaf: shape_of(self.arguments.leaves[leaf]) for leaf in self.traced.inputs}


def _surroundings(arguments: Arguments) -> tuple[Any, ...]:
    """What a layer's trace depends on beside the layer and its arguments; torch.export may run a model again."""
    mode = next((leaf.fake_mode for leaf in arguments.leaves if isinstance(leaf, FakeTensor)), None)
    return mode, torch._C._is_any_autocast_enabled(), torch.get_default_dtype()


_LIBRARIES: Final = ("torch.", "transformers.", "t2n_hf.")


def is_library_code(layer: nn.Module) -> bool:
    """Whether all that runs in a module is of libraries, whose layers depend on nothing but what is compared.

    A user's code may read what it likes: how often it was called, or a switch that the model turns between two layers.
    """
    codes: dict[int, Any] = {}  # most parts are of few classes
    for part in modules_of(layer):
        own = vars(part)
        codes[id(type(part))] = type(part)
        for code in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()):
            codes[id(code)] = code
        if "forward" in own:
            codes[id(own["forward"])] = own["forward"]
    return all(f"{getattr(code, '__module__', '')}.".startswith(_LIBRARIES) for code in codes.values())


@final
@dataclass
class PieceRecorder:
    """Records the layers of one capture. `pieces`, `calls` are complete when the model has been traced.

    Args:
        module: the module that is traced.
        layers: names of its ModuleLists of layers.
        name_weight: gives a module's name among the weights from its name inside `module`.
        late: keep calls beside the graph while torch.export works on it, where that can be.
    """

    module: nn.Module
    layers: tuple[str, ...]
    name_weight: Callable[[str], str]
    late: bool = True
    calls: dict[int, PieceCall] = field(default_factory=dict)
    _kinds: list[_Kind] = field(default_factory=list)
    _descriptions: list[Any] = field(default_factory=list)
    _results: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _trusted: set[int] = field(default_factory=set)
    _called_first: dict[int, SeenCall] = field(default_factory=dict)
    _late: LateCalls | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The kinds, in the order of their first layers."""
        return [kind.traced.piece for kind in self._kinds]

    def results(self, call: int) -> list[torch.Tensor]:
        """Fresh fake tensors like the results of this call."""
        return [torch.empty_like(value) for value in self._results[call]]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put stand-ins in the place of the layers until the block is left in any way."""
        undo: list[tuple[dict[str, Any], str, nn.Module]] = []
        token = _RECORDER.set(self)
        try:
            for list_name in self.layers:
                children: dict[str, Any] = self.module.get_submodule(list_name)._modules
                for key, layer in [(key, layer) for key, layer in children.items() if layer is not None]:
                    undo.append((children, key, layer))
                    children[key] = _StandIn(layer, self._caller(layer, f"{list_name}.{key}"))
            # Remembering what operators give pays where layers repeat them: here it takes a sixth of the time.
            with dynamo_config.patch(fake_tensor_cache_enabled=False):
                yield
        finally:
            for children, key, layer in undo:
                children[key] = layer
            _RECORDER.reset(token)

    def _caller(self, layer: nn.Module, where: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        description = self._description_of(layer)  # now: while torch.export runs, buffers cannot be read
        return partial(self._call, layer, where, description)

    def _call(
        self,
        layer: nn.Module,
        where: str,
        description: Any,  # noqa: ANN401 - any value with an equality
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - the layer's result
        return self._record(layer, where, description, bind(layer, args, kwargs, where))

    def _description_of(self, layer: nn.Module) -> Any:  # noqa: ANN401 - any value with an equality
        """What `describe_layer` gives; equal ones are one object, as each is several hundred."""
        description = describe_layer(layer)
        for known in self._descriptions:
            if known == description:
                return known
        self._descriptions.append(description)
        return description

    def _record(self, layer: nn.Module, where: str, description: Any, arguments: Arguments) -> Any:  # noqa: ANN401
        number, inputs, changed = self._kind_of(layer, where, description, arguments)
        traced = self._kinds[number].traced
        call = len(self.calls)
        self.calls[call] = PieceCall(number, f"{self.name_weight(where)}.")
        self._results[call] = traced.results
        leaves = arguments.leaves
        results = self._called(number, call, [leaves[leaf] for leaf in inputs])
        arguments.replace({leaf: results[at] for leaf, at in zip(changed, traced.changed.values(), strict=True)})
        return traced.rebuild(results, inputs, arguments)

    def _called(self, number: int, call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call this kind: the first time it is put into the graph as torch does it, later ones are like that."""
        known = self._called_first.get(number)
        results = None if known is None else self._called_later(known, call, tensors)
        if results is None:
            results = torch.ops.t2n_hf.layer(call, tensors)
            self._called_first[number] = seen_call(results)
        return results

    def _called_later(self, known: SeenCall, call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if not self.late or known.tracer is None or not known.is_fake or known.tracer is not traced_by():
            return None
        if self._late is None or self._late.tracer is not known.tracer:
            self._late = LateCalls(known.tracer, 0 if self._late is None else self._late.next)
        return self._late.call(known, LAYER_OP, call, tensors)

    def late_calls_restored(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        """Put the calls into the graph that were kept beside it. Raises LateError when it has no place for them."""
        if self._late is not None:
            self._late.restored(graph, inputs)

    def _kind_of(
        self,
        layer: nn.Module,
        where: str,
        description: Any,  # noqa: ANN401 - any value with an equality
        arguments: Arguments,
    ) -> tuple[int, list[int], list[int]]:
        index, surroundings = layer_index(layer), _surroundings(arguments)
        for number, kind in enumerate(self._kinds):
            if kind.description is not description or kind.surroundings != surroundings:
                continue
            leaves = kind.leaves_for(arguments, index)
            if leaves is None:
                continue
            if number not in self._trusted:
                if not self._same_trace(kind, layer, where, arguments, leaves):
                    continue
                if not may_count(layer) and is_library_code(layer):  # and so are all of this description
                    self._trusted.add(number)
            return number, *leaves
        traced = trace_layer(layer, arguments, self.name_weight(where), piece_name(layer))
        self._kinds.append(_Kind(description, surroundings, index, arguments.snapshot(), traced))
        return len(self._kinds) - 1, list(traced.inputs), list(traced.changed)

    def _same_trace(
        self,
        kind: _Kind,
        layer: nn.Module,
        where: str,
        arguments: Arguments,
        leaves: tuple[list[int], list[int]],
    ) -> bool:
        """Run the layer too, and see whether it is what its description says. The second one of a kind always is.

        It is traced where that cannot be told from operators that are compared one by one.
        """
        if is_repeated(kind.traced, layer, arguments, *leaves):
            return True
        traced = trace_layer(layer, arguments, self.name_weight(where), piece_name(layer))
        same_places = (traced.inputs, list(traced.changed)) == leaves and traced.spec == kind.traced.spec
        same_places = same_places and kind.traced.returns(traced.returned, leaves[0])
        return same_places and describe_piece(traced.piece) == describe_piece(kind.traced.piece)
