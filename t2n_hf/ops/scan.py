"""Loops over a length, by tract's scan: a body that runs once for each element, with states handed on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from t2n_hf.nnef.ir import Assign, Fragment, Name
from t2n_hf.nnef.names import Namer
from t2n_hf.ops.builder import Builder
from t2n_hf.ops.dims import Length
from t2n_hf.ops.value import Value

__all__ = ["ScanResult", "Step", "scan"]

Step: TypeAlias = "Callable[[Builder, list[Value], list[Value], list[Value]], tuple[list[Value], list[Value]]]"


@dataclass(frozen=True)
class ScanResult:
    """What a scan gives.

    Attributes:
        states: each state after the last step.
        outputs: what each step gave, along a new first axis, in the order of the elements.
    """

    states: list[Value]
    outputs: list[Value]


def scan(
    emit: Builder,
    name: str,
    step: Step,
    *,
    elements: Mapping[str, Value],
    states: Mapping[str, Value],
    shared: Mapping[str, Value] = MappingProxyType({}),
    reverse: bool = False,
) -> ScanResult:
    """Run `step` for each index of the first axis of `elements`, which all have the same length there, at least 1.

    The body becomes a fragment of the document; scans with the same body share it. Nothing is kept from one run of the
    model to the next. `elements`, `states` and `shared` are given with the names that they have in the body.

    Args:
        emit: where the call is written.
        name: stem of the fragment's name.
        step: called once, as `step(body, elements, states, shared)`: writes one step with `body`, out of elements
            without their first axis, and gives the next states and the step's outputs.
        elements: what is walked along its first axis.
        states: the first states; the next ones have their shapes and dtypes.
        shared: what every step sees as it is: weights.
        reverse: go from the last element to the first; outputs are still in the order of the elements.
    """
    inside = _Body(emit, elements, states, shared)
    next_states, outputs = step(inside.builder, inside.elements, inside.states, inside.shared)
    results = inside.results(next_states, outputs)
    fragment = emit.fragments.add(Fragment(name, inside.parameters, results, tuple(inside.builder.body)))
    count, stride = len(states), -1 if reverse else 1
    length = next(iter(elements.values())).shape[0]
    outs = [(state.shape, state.dtype) for state in states.values()]
    outs += [((length, *output.shape), output.dtype) for output in outputs]
    names = iter(inside.parameters)
    given = emit.call_many(
        "tract_core_scan",
        outs=outs,
        body=fragment,
        scan=[(next(names), value, 0, stride) for value in elements.values()],
        state=[(next(names), value, results[place]) for place, value in enumerate(states.values())],
        full=[(next(names), value) for value in shared.values()],
        output=[(r, "last", 0, 1) for r in results[:count]] + [(r, "full", 0, stride) for r in results[count:]],
        skip=0,
        reset_every_turn=True,
        external_state=False,
    )
    return ScanResult(given[:count], given[count:])


class _Body:
    """The inside of a scan: a builder of its own, and what it starts from."""

    def __init__(
        self, emit: Builder, elements: Mapping[str, Value], states: Mapping[str, Value], shared: Mapping[str, Value]
    ) -> None:
        self._namer = Namer(emit.fragments.symbols)
        self.builder = Builder(self._namer, emit.fragments)
        self.builder.site = emit.site
        slices = [self._parameter(name, value, (1, *value.shape[1:])) for name, value in elements.items()]
        self.states = [self._parameter(name, value, value.shape) for name, value in states.items()]
        self.shared = [self._parameter(name, value, value.shape) for name, value in shared.items()]
        self.parameters = tuple(value.name.text for value in (*slices, *self.states, *self.shared))
        self.elements = [self.builder.squeeze(value, [0]) for value in slices]

    def _parameter(self, stem: str, value: Value, shape: tuple[Length, ...]) -> Value:
        return Value(Name(self._namer.unique(stem)), shape, value.dtype)

    def results(self, states: Sequence[Value], outputs: Sequence[Value]) -> tuple[str, ...]:
        """Names of what the body gives: one for each use, as tract looks results up by their names."""
        given = [*states, *(self.builder.unsqueeze(output, [0]) for output in outputs)]
        names: list[str] = []
        for value in given:
            name = value.name.text
            if name in names or name in self.parameters:
                copied = self._namer.unique(self.builder.base)
                self.builder.body.append(Assign((copied,), "copy", (value.name,), {}))
                name = copied
            names.append(name)
        return tuple(names)
