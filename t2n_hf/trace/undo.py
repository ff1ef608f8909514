"""What a forward changes in its modules, put back: each capture begins with the model as it was given.

A forward that runs while a model is captured may set attributes, put a part in the place of another, or register hooks.
What one attempt left behind the next one would take for the model, with other conditions or none.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from t2n_hf.trace.walk import are_the_same

__all__ = ["changes_undone", "undo_of"]

# What torch keeps in dictionaries of a module. Those of tensors are left to whoever puts stand-ins into them.
_HELD: Final = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def undo_of(parts: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember what each of `parts` has; the result puts it back, any number of times."""
    before = [(vars(part), dict(vars(part)), _held(vars(part))) for part in parts]

    def undo() -> None:
        for own, attributes, held in before:
            if not are_the_same(own, attributes):
                own.clear()
                own.update(attributes)
            for name in _HELD:
                _put_back(own.get(name), held.get(name, {}))

    return undo


@contextmanager
def changes_undone(parts: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
    """After any exit each of `parts` has the attributes, parts and hooks that it had, and no others.

    Gives a function that puts them back at once, for another attempt in the same block.
    """
    undo = undo_of(parts)
    try:
        yield undo
    finally:
        undo()


def _held(own: dict[str, Any]) -> dict[str, dict[Any, Any]]:
    return {name: dict(found) for name in _HELD if isinstance(found := own.get(name), dict) and found}


def _put_back(found: object, before: dict[Any, Any]) -> None:
    if isinstance(found, dict) and (found or before) and list(found.items()) != list(before.items()):
        found.clear()
        found.update(before)
