"""Which function writes which ATen operator. The key is the overload itself, never a name."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["COMPLEX_EMITTERS", "EMITTERS", "Emitter", "EmitterTable", "place_of"]

Emitter = Callable[..., Any]
_F = TypeVar("_F", bound=Emitter)


class EmitterTable:
    """Emitters by overload.

    An emitter is called as `emitter(emit, *args, **kwargs)` with the arguments of the call in the graph, tensors as
    `Value`s, and gives a `Value`, or a list of them for an operator with several results.
    """

    def __init__(self, known: Mapping[Any, Emitter] | None = None) -> None:
        self._emitters: dict[Any, Emitter] = dict(known or {})

    def emits(self, *overloads: Any) -> Callable[[_F], _F]:  # noqa: ANN401 - OpOverload, or a function of operator
        """Register the decorated function for these overloads.

        Raises:
            ValueError: one of them has an emitter already; the text names both.
        """

        def register(emitter: _F) -> _F:
            for overload in overloads:
                self.add(overload, emitter)
            return emitter

        return register

    def add(self, overload: Any, emitter: Emitter) -> None:  # noqa: ANN401 - OpOverload, or a function of operator
        """Register one emitter. Raises ValueError when the overload has one already."""
        known = self._emitters.get(overload)
        if known is not None and known is not emitter:
            raise ValueError(f"{overload} has two emitters: {place_of(known)} and {place_of(emitter)}")
        self._emitters[overload] = emitter

    def get(self, overload: Any) -> Emitter | None:  # noqa: ANN401 - OpOverload, or a function of operator
        """The emitter of an overload, or None."""
        return self._emitters.get(overload)

    def __contains__(self, overload: object) -> bool:
        return overload in self._emitters

    def __len__(self) -> int:
        return len(self._emitters)

    def overloads(self) -> list[Any]:
        """All overloads that have an emitter, sorted by name."""
        return sorted(self._emitters, key=str)

    def extended(self, more: Mapping[Any, Emitter]) -> "EmitterTable":
        """A copy with further emitters. Raises ValueError when an overload has one already."""
        table = EmitterTable(self._emitters)
        for overload, emitter in more.items():
            table.add(overload, emitter)
        return table


def place_of(emitter: Emitter) -> str:
    """Where an emitter is defined: `module.name`."""
    return f"{emitter.__module__}.{emitter.__qualname__}"


EMITTERS = EmitterTable()
# For calls that take or give complex numbers.
COMPLEX_EMITTERS = EmitterTable()
