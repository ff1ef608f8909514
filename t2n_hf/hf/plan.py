"""Which parameter is quantized to which class, and why the others are not. Looks at shapes and names only."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from t2n_hf.contract import WeightFormat
from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import NOT_QUANTIZED, T2NConfig
from t2n_hf.registry import format_class

__all__ = ["Choice", "Plan", "make_plan", "matches", "tied_groups"]

_EXPERTS: Final = re.compile(r"(^|\.)experts(\.|$)")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of one parameter.

    `format` is the class it is quantized to, None when it stays float; then `reason` says why. `transposed`: the
    parameter is (..., in, out), and its class holds it as (..., out, in). `by_user`: the reason is an option.
    `by_rows`: only rows of it are read, one for each token, and it is never multiplied.
    """

    format: type[WeightFormat] | None = None
    transposed: bool = False
    reason: str = ""
    by_user: bool = False
    by_rows: bool = False

    def compute(self, asked: str) -> str:
        """Say how it computes in a model that is asked to compute as `asked`: no kernel reads single rows."""
        return "exact" if self.by_rows else asked

    def nbytes(self, shape: Iterable[int], compute: str) -> int | None:
        """Bytes that it takes in memory in a model that is asked to `compute` so, None when it is not quantized."""
        if self.format is None:
            return None
        return self.format.resident_nbytes(_as_held(tuple(shape), self.transposed), self.compute(compute))


Plan = Mapping[str, Choice]


def matches(pattern: str, name: str) -> bool:
    """Say whether `pattern` is `name`, or a run of whole dotted parts of it."""
    return f".{pattern}." in f".{name}."


def tied_groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each tied parameter to all names of its table, the one that keeps it first.

    Tied are those that a model of transformers declares, and those that are one object.
    """
    groups: dict[str, list[str]] = {}
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in declared.items():
        groups.setdefault(source, [source]).append(target)
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    for names in same.values():
        if len(names) > 1 and not any(name in declared or name in groups for name in names):
            groups[names[0]] = names
    return {name: tuple(names) for names in groups.values() for name in names}


def make_plan(model: nn.Module, config: T2NConfig) -> Plan:
    """Decide for every parameter of `model`, whose weights may be on meta.

    Warns about names in `modules_to_not_convert` that match nothing. Raises ConfigError when options contradict each
    other or the model: two choices for one tied table, an embeddings choice and a list that names them, a head that
    the model does not have.
    """
    skips = _Skips(model, config)
    tables = _tables(model, config)
    chosen = _format_or_none(config.weights)
    skips.refuse_contradictions(tables)
    plan: dict[str, Choice] = {}
    groups = tied_groups(model)
    for name, module, parameter in _parameters(model):
        table = tables.get(name)
        if table is not None:
            by_rows = isinstance(module, nn.Embedding) and name not in groups
            plan[name] = replace(_of_table(table, parameter, module), by_rows=by_rows)
        else:
            plan[name] = skips.reason(name) or _of_weight(name, module, parameter, chosen)
    skips.warn_about_unused()
    return _agree_on_ties(plan, groups, tables)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{path}.{leaf}" if path else leaf), module, parameter


@dataclass(frozen=True)
class _Table:
    """The token embeddings or the head: `option` is the choice ("q4_0", "none" or None) and `said_by` who made it."""

    option: str | None
    said_by: str
    format: type[WeightFormat] | None


def _embedding_weight(model: nn.Module, get: str) -> str | None:
    try:
        module = getattr(model, get)()
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    return next((f"{path}.weight" if path else "weight" for path, m in model.named_modules() if m is module), None)


def _tables(model: nn.Module, config: T2NConfig) -> dict[str, _Table]:
    """Find the parameters that follow `embeddings` and `lm_head`, tied ones included."""
    embedding = _embedding_weight(model, "get_input_embeddings")
    head = _embedding_weight(model, "get_output_embeddings")
    for option, value, found in (("embeddings", config.embeddings, embedding), ("lm_head", config.lm_head, head)):
        if found is None and value not in (None, NOT_QUANTIZED):
            raise ConfigError(f"{option}={value!r}, but {type(model).__name__} has none; leave the option out")
    groups = tied_groups(model)
    tables = {}
    if embedding is not None:
        tables[embedding] = _Table(config.embeddings, "embeddings", _format_or_none(config.embeddings))
    if head is not None and head != embedding:
        tables[head] = _Table(config.lm_head, "lm_head", _format_or_none(config.lm_head))
    if embedding is not None and head is not None and head in groups.get(embedding, (embedding,)):
        one = _one_table(config)
        tables = {embedding: one, head: one}
    return {**tables, **{other: table for name, table in tables.items() for other in groups.get(name, ())}}


def _one_table(config: T2NConfig) -> _Table:
    """Settle on one choice for embeddings and head that are one table."""
    said = {option: getattr(config, option) for option in ("embeddings", "lm_head")}
    made = {option: value for option, value in said.items() if value is not None}
    if len({_format_or_none(value) for value in made.values()}) > 1:
        raise ConfigError(
            f"embeddings={config.embeddings!r} and lm_head={config.lm_head!r}, but this model keeps both in one tied "
            "table; give one of them, or the same twice"
        )
    option, value = next(iter(made.items()), ("embeddings", None))
    return _Table(value, option, _format_or_none(value))


def _format_or_none(name: str | None) -> type[WeightFormat] | None:
    return None if name is None or name == NOT_QUANTIZED else format_class(name)


class _Skips:
    """What `modules_to_not_convert` leaves out, and which of its names were of use."""

    def __init__(self, model: nn.Module, config: T2NConfig) -> None:
        listed = config.modules_to_not_convert
        self._by_user = listed is not None
        self._patterns = list(listed) if listed is not None else sorted(_left_out(model))
        kept = [
            pattern
            for option in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for pattern in getattr(model, option, None) or ()
        ]
        self._float32 = [re.compile(pattern) for pattern in kept]
        names = [name for name, _, _ in _parameters(model)]
        self._unused = [p for p in self._patterns if not any(matches(p, name) for name in names)]

    def reason(self, name: str) -> Choice | None:
        if any(pattern.search(name) for pattern in self._float32):
            return Choice(reason="the architecture keeps it in float32", by_user=True)
        for pattern in self._patterns:
            if matches(pattern, name):
                whose = "modules_to_not_convert names" if self._by_user else "transformers leaves out"
                return Choice(reason=f"{whose} {pattern!r}", by_user=True)
        return None

    def refuse_contradictions(self, tables: Mapping[str, _Table]) -> None:
        if not self._by_user:
            return
        for name, table in tables.items():
            for pattern in self._patterns:
                if table.format is not None and matches(pattern, name):
                    raise ConfigError(
                        f"{table.said_by}={table.option!r} quantizes {name}, but modules_to_not_convert names "
                        f"{pattern!r}; remove one of them"
                    )

    def warn_about_unused(self) -> None:
        if self._by_user and self._unused:
            names = ", ".join(map(repr, self._unused))
            warnings.warn(f"modules_to_not_convert names what this model does not have: {names}", stacklevel=2)


def _left_out(model: nn.Module) -> Iterable[str]:
    """Name what transformers leaves out by default; of any other module the same: the last one, and what is tied."""
    if hasattr(model, "all_tied_weights_keys") and hasattr(model, "get_output_embeddings"):
        left: list[str] = get_keys_to_not_convert(model)
        return left
    names = [name for name, _ in model.named_parameters()][-1:]
    return {name.removesuffix(".weight").removesuffix(".bias") for name in (*names, *tied_groups(model))}


def _of_table(table: _Table, parameter: torch.Tensor, module: nn.Module) -> Choice:
    if table.format is None:
        said = (
            f"{table.said_by}={table.option!r}" if table.option else "embeddings and head stay float unless asked for"
        )
        return Choice(reason=said, by_user=True)
    return _unless_refused(table.format, parameter, transposed=isinstance(module, Conv1D))


def _of_weight(name: str, module: nn.Module, parameter: torch.Tensor, chosen: type[WeightFormat] | None) -> Choice:
    path, _, leaf = name.rpartition(".")
    is_matrix = leaf == "weight" and isinstance(module, (nn.Linear, Conv1D))
    is_experts = parameter.dim() == 3 and leaf != "bias" and _EXPERTS.search(path) is not None
    if not (is_matrix or is_experts):
        return Choice(reason=f"not a matrix of a linear layer ({type(module).__name__})", by_user=parameter.dim() < 2)
    if chosen is None:
        return Choice(reason=f"weights={NOT_QUANTIZED!r}", by_user=True)
    transposed = isinstance(module, Conv1D) or (is_experts and _holds_turned_experts(module))
    return _unless_refused(chosen, parameter, transposed=transposed)


def _holds_turned_experts(module: nn.Module) -> bool:
    """Say whether the experts' matrices are (in, out): the module says so, or the shapes of the two leave no doubt."""
    said = getattr(module, "is_transposed", None)
    if said is not None:
        return bool(said)
    stacks = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(stack, torch.Tensor) and stack.dim() == 3 for stack in stacks):
        return False
    (_, *up), (_, *down) = (stack.shape for stack in stacks if stack is not None)
    usual = up[1] == down[0] and up[0] == 2 * down[1]
    return not usual and up[0] == down[1] and up[1] == 2 * down[0]


def _unless_refused(chosen: type[WeightFormat], parameter: torch.Tensor, *, transposed: bool) -> Choice:
    if not parameter.is_floating_point():
        return Choice(reason=f"{parameter.dtype} is not a float type")
    refusal = chosen.refuses(_as_held(tuple(parameter.shape), transposed), parameter.dtype)
    return Choice(format=None if refusal else chosen, transposed=transposed, reason=refusal or "")


def _as_held(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def _agree_on_ties(
    plan: dict[str, Choice], groups: Mapping[str, tuple[str, ...]], tables: Mapping[str, _Table]
) -> dict[str, Choice]:
    """Make every name of a tied table share one choice; without an agreement it stays float."""
    for name, group in groups.items():
        choices = [plan[other] for other in group if other in plan]
        if name not in plan or name in tables or len({(c.format, c.transposed) for c in choices}) <= 1:
            continue
        dense = next(choice for choice in choices if choice.format is None or choice.transposed)
        why = dense.reason or "it is held both ways round"
        for other in group:
            if other in plan:
                plan[other] = replace(
                    dense, format=None, transposed=False, reason=f"tied to a weight that stays float: {why}"
                )
    return plan
