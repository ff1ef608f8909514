"""docs/operators.md: every overload with an emitter, and what the cases of this folder say of it."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

from case_matrix import Call

from t2n_hf.export.lower import emitter_table
from t2n_hf.ops.refused import REFUSED

__all__ = ["limits_of", "listed_operators", "name_of", "page"]

HEAD = """# Operators

Every overload of ATen (and of what the capture itself calls) that t2n-hf writes as NNEF, one table for each file of
`t2n_hf/ops/`. `scripts/operators.py --write` makes this page from the emitters and from the cases of `tests/ops`, each
of which is run in tract and compared with PyTorch; tests hold the page to both.

- **dtypes**: of the first tensor, in cases that are run. f16 is what an f16 export computes in; bfloat16 becomes f32.
- **lengths**: "free" when a case runs it at lengths that were not traced, else "fixed".
- **cases**: files of `tests/ops`, and how many of their cases call it. "as `x`": no case calls this form, which the
  capture replaces by `x`, or which has the emitter of `x`. "-": no case calls it; the models of `tests/zoo` may.
- **limits**: what its emitter refuses, by a message that names the module and the line of source.

An operator that is not here is tried by torch's own decomposition; what then is still unknown is reported, all of it at
once, before anything is written. `plugins/README.md` says how a distribution adds one.
"""


def name_of(overload: Any) -> str:
    """How a graph names what it calls."""
    return str(overload) if "." in str(overload) and " " not in str(overload) else f"operator.{overload.__name__}"


def _functions(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """The function, and those of t2n_hf.ops that it calls, each once."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        found = inspect.unwrap(waiting.pop())
        if id(found) in seen or not isinstance(found, FunctionType):
            continue
        seen.add(id(found))
        yield found
        names = {*found.__code__.co_names, *found.__code__.co_freevars}
        waiting += [found.__globals__[name] for name in sorted(names) if _is_ours(found.__globals__.get(name))]


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.startswith("t2n_hf.ops.")


def limits_of(emitter: Callable[..., Any]) -> list[str]:
    """Texts of what an emitter, and the functions that it calls, refuse; `...` stands for what depends on the call."""
    texts: list[str] = []
    for function in _functions(emitter):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse":
                texts.append(_text(node.args[0]))
    return sorted(dict.fromkeys(texts))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "..."


def listed_operators(text: str) -> dict[str, str]:
    """Operator -> its row, of the tables of emitters in a page."""
    rows = [line for line in text.split("\n## By decomposition")[0].splitlines() if line.startswith("| `")]
    return {row.split("`")[1]: row for row in rows}


def page(calls: Mapping[str, Collection[Call]], written: Mapping[str, Collection[Call]]) -> str:
    """The text of the page. `calls` and `written`: case -> what the captured graph calls, and what emitters wrote."""
    table = emitter_table()
    used: dict[str, list[tuple[str, Call]]] = {}
    for case, found in written.items():
        for call in found:
            used.setdefault(call.overload, []).append((case, call))
    emitters = {name_of(overload): table.get(overload) for overload in table.overloads()}
    families: dict[str, list[str]] = {}
    for name, emitter in emitters.items():
        families.setdefault(emitter.__module__.rpartition(".")[2], []).append(name)
    parts = [HEAD]
    for family, names in sorted(families.items()):
        parts.append(f"\n## {family}\n\n| operator | dtypes | lengths | cases | limits |\n|---|---|---|---|---|\n")
        parts += [_row(name, emitters, used) for name in sorted(names)]
    return "".join(parts) + _decomposed(calls, emitters) + _refused()


def _row(name: str, emitters: Mapping[str, Any], used: Mapping[str, list[tuple[str, Call]]]) -> str:
    found = used.get(name, [])
    limits = "; ".join(limits_of(emitters[name])).replace("|", "\\|") or "-"
    if not found:
        return f"| `{name}` | - | - | {_twin(name, emitters, used)} | {limits} |\n"
    dtypes = ", ".join(sorted({call.dtype for _, call in found}))
    lengths = "free" if any(call.free for _, call in found) else "fixed"
    return f"| `{name}` | {dtypes} | {lengths} | {_cases(case for case, _ in found)} | {limits} |\n"


def _twin(name: str, emitters: Mapping[str, Any], used: Collection[str]) -> str:
    stem = name.replace("_.", ".")
    twins = [stem, *(other for other in sorted(emitters) if emitters[other] is emitters[name])]
    return next((f"as `{twin}`" for twin in twins if twin in used and twin != name), "-")


def _cases(names: Iterator[str]) -> str:
    files = [name.split("/")[0] for name in sorted(set(names))]
    return ", ".join(f"{file} {files.count(file)}" for file in sorted(set(files)))


def _decomposed(calls: Mapping[str, Collection[Call]], emitters: Collection[str]) -> str:
    found: dict[str, set[str]] = {}
    for case, mine in calls.items():
        for call in mine:
            if call.overload not in emitters:
                found.setdefault(call.overload, set()).add(case)
    rows = [f"| `{name}` | {_cases(iter(sorted(mine)))} |\n" for name, mine in sorted(found.items())]
    head = "\n## By decomposition\n\nWithout an emitter; torch says what they are made of. Those that cases call:\n\n"
    return f"{head}| operator | cases |\n|---|---|\n{''.join(rows)}"


def _refused() -> str:
    rows = [f"| `{name_of(overload)}` | {reason} |\n" for overload, reason in sorted(REFUSED.items(), key=str)]
    head = "\n## Refused\n\nReported like what is unknown, each with the reason:\n\n"
    return f"{head}| operator | reason |\n|---|---|\n{''.join(rows)}"
