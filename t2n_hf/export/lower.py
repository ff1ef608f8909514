"""A captured model as an NNEF document: calls written by the emitters, weights as variables, layers as fragments."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import torch

from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import EmitError, MissingEmittersError
from t2n_hf.export.decompose import decompose_unknown
from t2n_hf.export.lowered import Lowered, MissingOp, WeightBinding, WeightFormatInfo
from t2n_hf.export.lowering import Lowering
from t2n_hf.nnef.versions import needs_of, version_key
from t2n_hf.ops.attention import rope
from t2n_hf.ops.emit import Emit, EmitOptions
from t2n_hf.ops.plugins import OPS_GROUP, declared_emitters
from t2n_hf.ops.recurrent import recurrent
from t2n_hf.ops.refused import REFUSED
from t2n_hf.ops.table import EMITTERS, Emitter, EmitterTable
from t2n_hf.ops.value import Value
from t2n_hf.places import module_of, source_line
from t2n_hf.trace.captured import Captured
from t2n_hf.trace.passes.rope import ROPE_OP
from t2n_hf.trace.pieces import LAYER_OP
from t2n_hf.trace.recurrent import RECURRENT_OP
from t2n_hf.trace.rewrites import REWRITES_GROUP

__all__ = ["Lowered", "MissingOp", "WeightBinding", "WeightFormatInfo", "emitter_table", "lower", "missing_emitters"]

_PLACES_SHOWN: Final = 3


def _item(_emit: Emit, values: list[Value], place: int) -> Value:
    return values[place]


def emitter_table(targets: Iterable[Any] = ()) -> EmitterTable:
    """Emitters of all families, of the calls that the capture makes, and those that others declare for `targets`.

    Raises TagClashError, ConfigError as `declared_emitters`.
    """
    own: dict[Any, Emitter] = {ROPE_OP: rope, RECURRENT_OP: recurrent, operator.getitem: _item}
    return EMITTERS.extended({**own, **declared_emitters(targets)})


def _targets(captured: Captured) -> set[Any]:
    graphs = (captured, *captured.pieces)
    return {node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}


def missing_emitters(captured: Captured) -> list[MissingOp]:
    """All operators without an emitter, once for each module that uses them."""
    table = emitter_table(_targets(captured))
    found: dict[tuple[str, str], MissingOp] = {}
    for graph, prefix in ((captured, ""), *((piece, f"{piece.where}.") for piece in captured.pieces)):
        for node in graph.graph.nodes:
            if node.op != "call_function" or node.target in table or node.target is LAYER_OP:
                continue
            if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool):
                continue
            module = f"{prefix}{module_of(node)}.".removeprefix("module.").rstrip(".")
            op = MissingOp(str(node.target), module, source_line(node), REFUSED.get(node.target, ""))
            found.setdefault((op.op, module), op)
    return list(found.values())


def lower(
    captured: Captured,
    formats: Mapping[str, WeightFormatInfo],
    *,
    dtype: Literal["f32", "f16"],
    properties: Mapping[str, str] | None = None,
    flat: bool = False,
    canonical: Mapping[str, str] | None = None,
    attention: Literal["decomposed", "sdpa"] = "decomposed",
    target: str | None = None,
) -> Lowered:
    """Write a captured model as a document.

    Args:
        captured: what `t2n_hf.trace.capture` gave for this dtype.
        formats: how weights are stored, by name; dense for the names that are not in it.
        dtype: of the floats.
        properties: text that tract keeps with the model.
        flat: write layers in place instead of as fragments.
        canonical: name of a weight -> the one name it is written under; by default tied weights have their first name.
        attention: "decomposed", or "sdpa" for tract's own operator.
        target: version of tract that has to run the document; None for the newest that is known.

    Raises:
        MissingEmittersError: operators without an emitter; all of them are listed.
        EmitError: an emitter refuses a form of its operator, or the target lacks what the model needs.
    """
    table = emitter_table(_targets(captured))
    known = {*table.overloads(), *REFUSED, LAYER_OP}
    for graph in (captured, *captured.pieces):
        decompose_unknown(graph, known)
    missing = missing_emitters(captured)
    if missing:
        raise MissingEmittersError(_missing_text(missing))
    options = EmitOptions(float_dtype=getattr(torch, dtype_named(dtype).torch), attention=attention, target=target)
    names = captured.canonical if canonical is None else canonical
    blocks = {names.get(name, name): info for name, info in formats.items() if info.format != "dense"}
    reasons: dict[str, str] = {}
    while True:
        usable = {name: info for name, info in blocks.items() if name not in reasons}
        run = Lowering(captured, table, usable, names, options, flat)
        lowered = run.run(properties or {}, reasons)
        if not run.forced_dense:
            _refuse_newer(lowered, target)
            return lowered
        # A weight whose format cannot be used in one place is dense in all, and the text may change with that.
        reasons.update(run.forced_dense)


def _refuse_newer(lowered: Lowered, target: str | None) -> None:
    if target is None:
        return
    newer = [need for need in needs_of(lowered.document) if version_key(need.version) > version_key(target)]
    if newer:
        texts = ", ".join(f"{need.what} (since {need.version})" for need in newer)
        least = max((need.version for need in newer), key=version_key)
        raise EmitError(f"tract {target} does not run this model, which needs {texts}; export it for tract=={least}")


def _missing_text(missing: list[MissingOp]) -> str:
    places: dict[str, list[MissingOp]] = {}
    for row in missing:
        places.setdefault(row.op, []).append(row)
    lines = []
    for op, rows in places.items():
        more = len(rows) - _PLACES_SHOWN
        lines.append(f"  {op}: {rows[0].reason}" if rows[0].reason else f"  {op}")
        lines += [f"    in {row.module or 'the model'}: {row.source_line}" for row in rows[:_PLACES_SHOWN]]
        lines += [f"    and in {more} more modules"] if more > 0 else []
    head = "1 operator of this model has" if len(places) == 1 else f"{len(places)} operators of this model have"
    return (
        f"{head} no emitter; nothing was written:\n" + "\n".join(lines) + "\n"
        f"An emitter is a function that a distribution declares in the entry points {OPS_GROUP!r} under the operator's "
        f"name, for example {next(iter(places))!r}; one in {REWRITES_GROUP!r} lets a module run other code while it is "
        "captured. plugins/README.md shows both"
    )
