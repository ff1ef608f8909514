"""The graph model: what an NNEF document holds, as frozen data.

An argument of a call is a `Name` (a reference to a value), a literal (bool, int, float, str), a `Dim` (a symbolic
integer), another `Call`, or a list or tuple of those. A list prints as `[a, b]`, a tuple as `(a, b)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Argument", "Assign", "Call", "Dim", "Document", "External", "Fragment", "Name", "Variable"]


@dataclass(frozen=True)
class Name:
    """A reference to a value: the name of an input, a variable, a fragment's parameter or a result."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Dim:
    """A symbolic integer expression of the document's symbols, in tract's syntax: "S+P", "(S+1)/2*3"."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Call:
    """A call with one result that is written where it is used: `matmul(x, unsqueeze(weight, axes=[0]))`."""

    op: str
    args: tuple["Argument", ...] = ()
    kwargs: Mapping[str, "Argument"] = field(default_factory=dict)


Argument: TypeAlias = "Name | Dim | Call | bool | int | float | str | list[Any] | tuple[Any, ...]"


@dataclass(frozen=True)
class Assign:
    """One line of a body: `results = op(*args, **kwargs)`. Several results are the values of one call."""

    results: tuple[str, ...]
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    comment: str | None = None


@dataclass(frozen=True)
class Variable:
    """A stored tensor: `name` in the graph, `label` of its `.dat` file (which gives the type), `shape` as stored."""

    name: str
    label: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class External:
    """An input of the graph: its dtype by tract name, and its shape with symbols."""

    name: str
    dtype: str
    shape: tuple[int | Dim, ...]


@dataclass(frozen=True)
class Fragment:
    """A function of values: parameters and results are tensors, the symbols of the document may be used inside."""

    name: str
    params: tuple[str, ...]
    results: tuple[str, ...]
    body: tuple[Assign, ...]
    doc: str | None = None


@dataclass(frozen=True)
class Document:
    """A whole graph.nnef.

    `extensions` are further extension lines (without the word and the semicolon), `symbols` are declared as tract
    symbols, `asserts` as tract asserts ("P >= 0", "tg: S==1"), `properties` are text that tract keeps with the model.
    """

    inputs: tuple[External, ...]
    outputs: tuple[str, ...]
    variables: tuple[Variable, ...]
    body: tuple[Assign, ...]
    fragments: tuple[Fragment, ...] = ()
    extensions: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    asserts: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    graph_name: str = "network"
