"""What a document computes, whatever its values and fragments are called and wherever fragments begin and end."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from t2n_hf.nnef.ir import Assign, Call, Document, Fragment, Name

__all__ = ["meaning_of"]


def meaning_of(document: Document, stored: Mapping[str, str]) -> str:
    """A text that two documents share when each output comes of the same calls of the same inputs and variables.

    `stored` says by label what a variable is known by, where that is not its label (the digest of its values).
    """
    reader = _Reader({fragment.name: fragment for fragment in document.fragments})
    values = {v.name: _digest("variable", stored.get(v.label, v.label), v.shape) for v in document.variables}
    values |= {given.name: _digest("input", given) for given in document.inputs}
    reader.read(document.body, values)
    outputs = [(name, values[name]) for name in document.outputs]
    return _digest(document.inputs, outputs, sorted(document.symbols), sorted(document.asserts))


@final
@dataclass(frozen=True)
class _Reader:
    fragments: Mapping[str, Fragment]

    def read(self, body: Iterable[Assign], values: dict[str, str]) -> None:
        """Add the meaning of each result of a body to `values`, in which that of what it uses is found."""
        for assign in body:
            values.update(zip(assign.results, self._results(assign, len(assign.results), values), strict=True))

    def _results(self, call: Assign | Call, count: int, values: Mapping[str, str]) -> list[str]:
        args = [self._argument(argument, values) for argument in call.args]
        kwargs = {name: self._argument(argument, values) for name, argument in call.kwargs.items()}
        if call.op == "copy":
            return args
        fragment = self.fragments.get(call.op)
        if fragment is not None:
            return self._of_fragment(fragment, {**dict(zip(fragment.params, args, strict=False)), **kwargs})
        meaning = _digest(call.op, args, sorted(kwargs.items()))
        return [_digest(meaning, place) for place in range(count)]

    def _of_fragment(self, fragment: Fragment, given: dict[str, str]) -> list[str]:
        self.read(fragment.body, given)
        return [given[name] for name in fragment.results]

    def _argument(self, argument: Any, values: Mapping[str, str]) -> str:  # noqa: ANN401 - an argument of the graph model
        if isinstance(argument, Name):
            return values[argument.text]
        if isinstance(argument, Call):
            return self._results(argument, 1, values)[0]
        if isinstance(argument, list | tuple):
            return _digest([self._argument(item, values) for item in argument])
        body = self.fragments.get(argument) if isinstance(argument, str) else None
        if body is not None:  # of a loop, whose arguments name its parameters
            return _digest(self._of_fragment(body, {name: _digest("parameter", name) for name in body.params}))
        return _digest(type(argument).__name__, argument)


def _digest(*parts: Any) -> str:  # noqa: ANN401 - whatever has a repr that tells it from others
    return hashlib.sha256(repr(parts).encode()).hexdigest()
