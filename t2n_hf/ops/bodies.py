"""Fragments that emitters write: bodies of loops."""

from collections.abc import Iterable
from dataclasses import replace

from t2n_hf.nnef.ir import Fragment
from t2n_hf.nnef.names import Namer

__all__ = ["Bodies"]


class Bodies:
    """Fragments of one document, each text once.

    Args:
        namer: names of the document's fragments.
        symbols: names that no value of a body may have.
    """

    def __init__(self, namer: Namer | None = None, symbols: Iterable[str] = ()) -> None:
        self.symbols = tuple(symbols)
        self._namer = Namer() if namer is None else namer
        self._named: dict[str, Fragment] = {}

    def add(self, fragment: Fragment) -> str:
        """Keep a fragment under its name, or one like it, and give the name; equal ones share one."""
        key = repr(fragment)
        if key not in self._named:
            self._named[key] = replace(fragment, name=self._namer.unique(fragment.name))
        return self._named[key].name

    def fragments(self) -> tuple[Fragment, ...]:
        """All that were added, in order."""
        return tuple(self._named.values())
