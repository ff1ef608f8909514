"""A `Document` as the text of graph.nnef: one line per input, variable and call, always the same text."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import FormatError
from t2n_hf.nnef.ir import Argument, Assign, Call, Dim, Document, External, Fragment, Name, Variable
from t2n_hf.nnef.names import is_identifier, member_problem

__all__ = ["to_text"]

_CORE: Final = "tract_registry tract_core"
_WIDTH: Final = 120
_NOTHING_TO_ESCAPE: Final = re.compile(r"[\w ./:=-]*", re.ASCII)


def to_text(document: Document) -> str:
    """Write the document.

    Raises FormatError, naming the value and the call, for a name that is no identifier, is given twice or is used
    before it has a value, for two variables of one label, and for a number that NNEF cannot say (NaN).
    """
    symbols = set(document.symbols)
    blocks = ["version 1.0;\n", _extensions(document)]
    if document.properties:
        blocks.append(_properties(document))
    names: set[str] = set()
    for fragment in document.fragments:
        _claim(fragment.name, names, "fragment")
        blocks.append(_fragment(fragment, symbols))
    blocks.append(_graph(document, symbols))
    return "\n".join(blocks)


def _extensions(document: Document) -> str:
    lines = [_CORE, *document.extensions]
    lines += [f"tract_symbol {_checked(symbol, 'symbol')}" for symbol in document.symbols]
    lines += [f"tract_assert {text}" for text in document.asserts]
    for line in lines:
        if ";" in line or "\n" in line:
            raise FormatError(f"extension {line!r} holds a semicolon or a line break; each is one statement")
    return "".join(f"extension {line};\n" for line in dict.fromkeys(lines))


def _properties(document: Document) -> str:
    rows = ",\n".join(f"    ({_quoted(key)}, {_quoted(value)})" for key, value in document.properties.items())
    head = "fragment tract_core_properties() -> (properties: (string, tensor<scalar>)[])"
    return f"{head}\n{{\n  properties = [\n{rows}\n  ];\n}}\n"


def _fragment(fragment: Fragment, symbols: set[str]) -> str:
    known = set(symbols)
    for name in fragment.params:
        _claim(name, known, f"parameter of {fragment.name}")
    lines = list(_body(fragment.body, known, fragment.name))
    _check_results(fragment.results, known, fragment.name)
    doc = "".join(f"# {line}".rstrip() + "\n" for line in (fragment.doc or "").splitlines())
    params = [f"{name}: tensor<scalar>" for name in fragment.params]
    results = [f"{name}: tensor<scalar>" for name in fragment.results]
    head = _fragment_signature(f"fragment {fragment.name}", params, results)
    return doc + head + "\n{\n" + "".join(lines) + "}\n"


def _graph(document: Document, symbols: set[str]) -> str:
    known = set(symbols)
    lines = []
    for external in document.inputs:
        _claim(external.name, known, "input")
        lines.append(_external(external))
    labels: set[str] = set()
    for variable in document.variables:
        _claim(variable.name, known, "variable")
        if variable.label in labels:
            raise FormatError(f"two variables have the label {variable.label!r}, so they would share one .dat file")
        labels.add(variable.label)
        lines.append(_variable(variable))
    lines += _body(document.body, known, document.graph_name)
    _check_results(document.outputs, known, document.graph_name)
    name, inputs = _checked(document.graph_name, "graph"), [external.name for external in document.inputs]
    # A line for all inputs and one for all outputs, however many: a layer adds no line to the signature.
    head = f"graph {name}(\n  {', '.join(inputs)}\n) -> (\n  {', '.join(document.outputs)}\n)"
    return head + "\n{\n" + "".join(lines) + "}\n"


def _fragment_signature(head: str, params: list[str], results: list[str]) -> str:
    line = f"{head}({', '.join(params)}) -> ({', '.join(results)})"
    if len(line) <= _WIDTH:
        return line
    return f"{head}(\n{_filled(params)}\n) -> (\n{_filled(results)}\n)"


def _filled(words: list[str]) -> str:
    lines = [" "]
    for number, word in enumerate(words):
        text = f" {word}{',' if number + 1 < len(words) else ''}"
        if len(lines[-1]) + len(text) > _WIDTH:
            lines.append(" ")
        lines[-1] += text
    return "\n".join(lines)


def _external(external: External) -> str:
    dtype = dtype_named(external.dtype).name
    return f"  {external.name} = tract_core_external(shape={_list(external.shape)}, datum_type={_quoted(dtype)});\n"


def _variable(variable: Variable) -> str:
    problem = member_problem(f"{variable.label}.dat")
    if problem is not None:
        raise FormatError(f"variable {variable.name!r}: its label {variable.label!r} cannot name a file: {problem}")
    label = _quoted(variable.label)
    return f"  {variable.name} = variable<scalar>(label={label}, shape={_list(variable.shape)});\n"


def _body(body: Iterable[Assign], known: set[str], where: str) -> Iterator[str]:
    for assign in body:
        yield _assign(assign, known, where)


def _assign(assign: Assign, known: set[str], where: str) -> str:
    call = f"{', '.join(assign.results)} = {assign.op} in {where}"
    written = _call(assign, known, call)
    for name in assign.results:
        _claim(name, known, f"result of {assign.op} in {where}")
    results = assign.results[0] if len(assign.results) == 1 else f"({', '.join(assign.results)})"
    comment = f"  # {' '.join(assign.comment.split())}" if assign.comment else ""
    return f"  {results} = {written};{comment}\n"


def _call(call: Assign | Call, known: set[str], where: str) -> str:
    arguments = [_argument(value, known, where) for value in call.args]
    arguments += [f"{_checked(key, 'argument')}={_argument(value, known, where)}" for key, value in call.kwargs.items()]
    return f"{_checked(call.op, 'operator')}({', '.join(arguments)})"


def _argument(value: Argument, known: set[str], call: str) -> str:
    if isinstance(value, Name):
        if value.text not in known:
            raise FormatError(f"{call}: {value.text!r} has no value at this point; define it before it is used")
        return value.text
    if isinstance(value, Call):
        return _call(value, known, call)
    if isinstance(value, list):
        return f"[{', '.join(_argument(item, known, call) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_argument(item, known, call) for item in value)})"
    try:
        return _literal(value)
    except FormatError as error:
        raise FormatError(f"{call}: {error}") from None


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Dim):
        if not value.text or any(mark in value.text for mark in ";\n\"'#"):
            raise FormatError(f"{value.text!r} is no integer expression")
        return value.text
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _quoted(value)
    raise FormatError(f"cannot write {value!r} of type {type(value).__name__}; expected a Name, Dim, literal or list")


def _number(value: float) -> str:
    if math.isnan(value):
        raise FormatError("NaN cannot be written in NNEF; compute it, or store it as a variable")
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(float(value))
    return text if "." in text or "e" in text else f"{text}.0"


def _quoted(text: str) -> str:
    if _NOTHING_TO_ESCAPE.fullmatch(text):
        return f'"{text}"'
    if not text.isprintable():
        raise FormatError(f"text {text!r} holds a character that is not printable")
    # tract wants both kinds of quotes escaped, whichever kind is around the text.
    return '"' + re.sub(r"""(["'\\])""", r"\\\1", text) + '"'


def _list(shape: Iterable[int | Dim]) -> str:
    return f"[{', '.join(_literal(dim) for dim in shape)}]"


def _checked(name: str, kind: str) -> str:
    if not is_identifier(name):
        rules = "letters, digits and _; no keyword; not beginning with true, false or inf"
        raise FormatError(f"{kind} name {name!r} is no NNEF identifier ({rules})")
    return name


def _claim(name: str, known: set[str], kind: str) -> None:
    _checked(name, kind)
    if name in known:
        raise FormatError(f"{kind} {name!r}: the name is taken; every value is named once")
    known.add(name)


def _check_results(results: Iterable[str], known: set[str], where: str) -> None:
    for name in results:
        if name not in known:
            raise FormatError(f"{where}: output {name!r} has no value")
