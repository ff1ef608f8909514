"""Capture of a model as a graph, by torch.export under fake tensors; no weight is read."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, Final, Literal

import sympy
import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from t2n_hf.errors import CaptureError, ConfigError, T2NError
from t2n_hf.trace.alike import inputs_restored
from t2n_hf.trace.automatic_types import AutomaticTypesError
from t2n_hf.trace.call_names import layer_calls_named
from t2n_hf.trace.called_pieces import keep_called_pieces
from t2n_hf.trace.capture_dispatch import capture_by_dispatch
from t2n_hf.trace.captured import Captured
from t2n_hf.trace.fakes import canonical_names, fake_weights
from t2n_hf.trace.flat import FlatInterface, dim_name, flatten_interface
from t2n_hf.trace.inline_constants import name_inline_constants
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.late_calls import LateError
from t2n_hf.trace.layers import PieceError
from t2n_hf.trace.lengths import export_with_lengths
from t2n_hf.trace.outline import outline_layers
from t2n_hf.trace.passes import make_pure, simplify
from t2n_hf.trace.passes.blocks import inline_blocks
from t2n_hf.trace.passes.outs import copy_outs
from t2n_hf.trace.passes.writes import refuse_kept_writes
from t2n_hf.trace.pieces import PieceRecorder
from t2n_hf.trace.rewrites import rewrites_used
from t2n_hf.trace.swap import plain_tensors_kept
from t2n_hf.trace.undo import changes_undone

__all__ = ["CAPTURE_MODES", "capture"]

CAPTURE_MODES: Final = ("auto", "pieces", "whole", "dispatch")


def capture(
    interface: Interface, dtype: torch.dtype, mode: Literal["auto", "pieces", "whole", "dispatch"] = "auto"
) -> Captured:
    """Capture the module of an interface with weights of `dtype`.

    Mode "pieces" traces each kind of the interface's layers once. "whole" traces every layer in place; layers whose
    graphs turn out to be the same are pieces too. "dispatch" runs the module once at the shapes of the example, which
    stay fixed (see `capture_by_dispatch`). "auto" is "pieces", or "whole" when a layer cannot be traced by itself, or
    "dispatch" when torch.export refuses the module and no length is to be free; `Captured.notes` says why. The module
    is left as it was.

    Raises:
        CaptureError: the module cannot be captured in this mode, or a layer cannot be a piece in mode "pieces".
        ConfigError: an unknown mode, or an interface whose parts do not fit together.
    """
    if mode not in CAPTURE_MODES:
        raise ConfigError(f"capture mode {mode!r}; expected one of {', '.join(CAPTURE_MODES)}")
    canonical = canonical_names(interface.weight_owner)
    layers = tuple(f"module.{name}" for name in interface.layers)
    with _as_found(interface), fake_weights(interface.module, dtype):
        flat = flatten_interface(interface, dtype)
        captured = _capture_as(mode, interface, flat, layers)
    captured.canonical = canonical
    for graph in (captured, *captured.pieces):
        simplify(graph)
    name_inline_constants((captured, *captured.pieces))
    return captured


@contextmanager
def _as_found(interface: Interface) -> Iterator[None]:
    with torch.no_grad(), plain_tensors_kept(interface.module), interface.context(), rewrites_used(interface.module):
        yield


def _capture_as(mode: str, interface: Interface, flat: FlatInterface, layers: tuple[str, ...]) -> Captured:
    if mode == "auto":
        return _capture_somehow(interface, flat, layers)
    if mode == "dispatch":
        return capture_by_dispatch(interface, flat, _weight_namer(interface))
    if mode == "whole":
        return _capture_whole(interface, flat, layers)
    try:
        return _capture_pieces(interface, flat, layers)
    except PieceError as reason:
        raise CaptureError(f"{type(interface.module).__name__}: {reason}; capture it whole") from reason


def _capture_somehow(interface: Interface, flat: FlatInterface, layers: tuple[str, ...]) -> Captured:
    """In the first mode that works, with the reasons why those before it did not as notes."""
    notes: list[str] = []
    for mode in ("pieces", "whole", "dispatch") if layers else ("whole", "dispatch"):
        if mode == "dispatch" and flat.is_free:
            notes.append("capture='dispatch' may do, at the lengths of the example, which then are fixed")
            break
        try:
            captured = _capture_as(mode, interface, flat, layers)
            _refuse_reads(interface, captured)
        except AutomaticTypesError:
            raise
        except CaptureError as reason:
            notes.append(str(reason))
        else:
            captured.notes = (*notes, *captured.notes)
            return captured
    raise CaptureError("; ".join(dict.fromkeys(notes)))


def _refuse_reads(interface: Interface, captured: Captured) -> None:
    """Raise CaptureError when a graph holds for some inputs only; who asks for the mode by name accepts that."""
    if captured.reads:
        raise CaptureError(
            f"forward of {type(interface.module).__name__} reads a tensor's value that depends on its inputs: "
            f"{'; '.join(captured.reads)}. What it decides would be fixed in the archive: choose with torch.where, or "
            "accept it with capture='dispatch'"
        )


def _capture_pieces(interface: Interface, flat: FlatInterface, layers: tuple[str, ...]) -> Captured:
    try:
        return _capture_calls(interface, flat, layers, late=True)
    except LateError:
        return _capture_calls(interface, flat, layers, late=False)


def _capture_calls(interface: Interface, flat: FlatInterface, layers: tuple[str, ...], *, late: bool) -> Captured:
    recorder = PieceRecorder(flat.module, layers, _weight_namer(interface), late)
    with recorder.recording():
        exported = _export(flat, interface.asserts)
    captured = _read_export(exported, interface, flat, recorder)
    keep_called_pieces(captured, recorder)
    return captured


def _capture_whole(interface: Interface, flat: FlatInterface, layers: tuple[str, ...]) -> Captured:
    with layer_calls_named(flat.module, layers):
        exported = _export(flat, interface.asserts)
    captured = _read_export(exported, interface, flat)
    if layers:
        make_pure(captured)
        captured.notes = tuple(outline_layers(captured, flat.module, layers, _weight_namer(interface)))
    return captured


# A recurrent layer keeps a list of its parameters, which torch.export fills with its own and then takes for a write.
_RECURRENT_LISTS: Final = r"The tensor attributes? (self\.[\w.]*_flat_weights\[\d+\](, )?)+ (was|were) assigned"


def _export(flat: FlatInterface, asserts: tuple[str, ...]) -> torch.export.ExportedProgram:
    try:
        # Nothing runs these graphs, so that no pass has to make Python code of them.
        with _no_partial_graphs(), _use_lazy_graph_module(True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _RECURRENT_LISTS)
            with changes_undone(flat.parts) as undo:
                return export_with_lengths(flat.module, *flat.firsts, asserts, undo)
    except (T2NError, PieceError):
        raise
    except Exception as error:
        name = type(flat.module.module).__name__
        raise CaptureError(f"torch.export cannot capture {name}: {type(error).__name__}: {error}") from error


@contextmanager
def _no_partial_graphs() -> Iterator[None]:
    """Leave out of stderr the graph that torch.export prints when it fails: pages, whose point the error tells."""
    said = io.StringIO()
    unwanted = ""
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not unwanted:
            unwanted = f"{getattr(reason, 'partial_fx_graph', '')}"
            reason = reason.__cause__ or reason.__context__
        raise
    finally:
        sys.stderr.write(said.getvalue().replace(f"{unwanted}\n", "") if unwanted else said.getvalue())


def _weight_namer(interface: Interface) -> Any:  # noqa: ANN401 - a function of names
    """Names inside the flat module -> names of the weight owner."""
    start = ".".join(part for part in ("module", interface.prefix) if part) + "."

    def name(inside: str) -> str:
        return inside.removeprefix(start) if inside.startswith(start) else inside.removeprefix("module.")

    return name


def _read_export(
    exported: torch.export.ExportedProgram,
    interface: Interface,
    flat: FlatInterface,
    recorder: PieceRecorder | None = None,
) -> Captured:
    signature, graph = exported.graph_signature, exported.graph
    inline_blocks(exported.graph_module)
    copy_outs(graph)
    weight_name = _weight_namer(interface)
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    values = {**exported.state_dict, **exported.constants}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs, weights, constants, names = [], {}, {}, {}
    for node in placeholders:
        name = stored.get(node.name) or lifted.get(node.name)
        if name is None:
            inputs.append(node)
        elif isinstance(values[name], torch._subclasses.FakeTensor):
            weights[node] = weight_name(name)
        else:
            constants[node], names[node] = values[name], weight_name(name)
    inputs = inputs_restored(graph, inputs, flat.groups)
    if recorder is not None:
        recorder.late_calls_restored(graph, inputs)
    refuse_kept_writes(graph, {**weights, **names})
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    return Captured(
        graph=graph,
        inputs=list(zip(inputs, interface.input_names, strict=True)),
        outputs=list(zip(results, interface.output_names, strict=True)),
        weights=weights,
        constants=constants,
        constant_names=names,
        symbols=_symbols(inputs, flat),
        asserts=interface.asserts,
    )


def _symbols(inputs: list[fx.Node], flat: FlatInterface) -> dict[sympy.Symbol, str]:
    """Name the symbols: by the Dim of the input that has them, or N0, N1... for lengths without a named Dim."""
    symbols: dict[sympy.Symbol, str] = {}
    others: list[sympy.Symbol] = []
    for node, dims in zip(inputs, flat.dims, strict=True):
        for axis, length in enumerate(node.meta["val"].shape):
            if not isinstance(length, torch.SymInt):
                continue
            name, expression = dim_name(dims.get(axis)), length.node.expr
            if name is not None and expression.is_Symbol:
                symbols.setdefault(expression, name)
            others.extend(expression.free_symbols)
    for symbol in dict.fromkeys(others):
        symbols.setdefault(symbol, f"N{sum(name.startswith('N') for name in symbols.values())}")
    return symbols
