"""Small calls written where they are used, so that a body has a line for what a model computes and none for how."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from t2n_hf.nnef.ir import Assign, Call, Name

__all__ = ["nested"]

# Changes of a weight's rank, which NNEF asks for and no model is written with.
_SMALL: Final = frozenset({"unsqueeze"})


def nested(body: Iterable[Assign], stored: Collection[str], kept: Collection[str]) -> tuple[Assign, ...]:
    """The same body, in which a weight's change of rank that is used once is an argument of the call that uses it.

    Args:
        body: assignments in order.
        stored: names of weights.
        kept: names that must stay as they are: results of the body.

    A call that thereby has the only use of a name's stem takes the name over: `q_proj = unsqueeze(w)`,
    `q_proj_1 = matmul(x, q_proj)` becomes `q_proj = matmul(x, unsqueeze(w))`.
    """
    assigns = list(body)
    uses = Counter(name for assign in assigns for name in _names((assign.args, tuple(assign.kwargs.values()))))
    calls: dict[str, Call] = {}
    renamed: dict[str, str] = {}
    result: list[Assign] = []
    for assign in assigns:
        if _is_small(assign, stored) and uses[assign.results[0]] == 1 and assign.results[0] not in kept:
            calls[assign.results[0]] = Call(assign.op, assign.args, assign.kwargs)
            continue
        mine = [name for name in _names((assign.args, tuple(assign.kwargs.values()))) if name in calls]
        new = _substituted(assign, calls, renamed)
        if (
            len(mine) == 1
            and len(new.results) == 1
            and new.results[0] not in kept
            and _same_stem(mine[0], new.results[0])
        ):
            renamed[new.results[0]] = mine[0]
            new = replace(new, results=(mine[0],))
        result.append(new)
    return tuple(result)


def _is_small(assign: Assign, stored: Collection[str]) -> bool:
    first = assign.args[0] if assign.args else None
    one = len(assign.results) == 1 and len(assign.args) == 1 and assign.comment is None
    return one and assign.op in _SMALL and isinstance(first, Name) and first.text in stored


def _same_stem(name: str, other: str) -> bool:
    stem, _, number = other.rpartition("_")
    return number.isdigit() and (stem == name or stem == name.rpartition("_")[0])


def _names(argument: Any) -> Iterator[str]:  # noqa: ANN401 - an argument of the graph model
    if isinstance(argument, Name):
        yield argument.text
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _names(item)


def _substituted(assign: Assign, calls: dict[str, Call], renamed: dict[str, str]) -> Assign:
    def swap(argument: Any) -> Any:  # noqa: ANN401 - an argument of the graph model
        if isinstance(argument, Name):
            return calls.get(argument.text) or Name(renamed.get(argument.text, argument.text))
        if isinstance(argument, list | tuple):
            return type(argument)(swap(item) for item in argument)
        return argument

    kwargs = {key: swap(value) for key, value in assign.kwargs.items()}
    return replace(assign, args=tuple(swap(argument) for argument in assign.args), kwargs=kwargs)
