"""Capture of a model as a graph, by torch.export under fake tensors; no weight is read."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

import sympy
import torch
from torch import fx

from t2n_hf.errors import CaptureError, ConfigError, T2NError
from t2n_hf.trace.captured import Captured
from t2n_hf.trace.fakes import canonical_names, fake_weights
from t2n_hf.trace.flat import FlatInterface, dim_name, flatten_interface
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.layers import PieceError
from t2n_hf.trace.lengths import export_with_lengths
from t2n_hf.trace.passes import simplify
from t2n_hf.trace.passes.writes import refuse_kept_writes
from t2n_hf.trace.pieces import PieceRecorder
from t2n_hf.trace.recurrent import RecurrentLayersKept
from t2n_hf.trace.swap import plain_tensors_kept

__all__ = ["CAPTURE_MODES", "capture"]

CAPTURE_MODES: Final = ("auto", "pieces", "whole")


def capture(interface: Interface, dtype: torch.dtype, mode: Literal["auto", "pieces", "whole"] = "auto") -> Captured:
    """Capture the module of an interface with weights of `dtype`.

    Mode "pieces" traces each kind of the interface's layers once, "whole" traces every layer in place, and "auto" is
    "pieces", or "whole" when a layer cannot be a piece (`Captured.notes` says why). The module is left as it was.

    Raises:
        CaptureError: torch.export cannot capture the module, or a layer cannot be a piece in mode "pieces".
        ConfigError: an unknown mode, or an interface whose parts do not fit together.
    """
    if mode not in CAPTURE_MODES:
        raise ConfigError(f"capture mode {mode!r}; expected one of {', '.join(CAPTURE_MODES)}")
    canonical = canonical_names(interface.weight_owner)
    layers = () if mode == "whole" else interface.layers
    with _as_found(interface), fake_weights(interface.module, dtype):
        flat = flatten_interface(interface, dtype)
        try:
            captured = _capture(interface, flat, layers)
        except (PieceError, CaptureError) as reason:
            if mode == "pieces" and isinstance(reason, PieceError):
                raise CaptureError(f"{type(interface.module).__name__}: {reason}; capture it whole") from reason
            if mode != "auto" or not layers:
                raise
            captured = _capture(interface, flat, ())
            captured.notes = (str(reason),)
    captured.canonical = canonical
    for graph in (captured, *captured.pieces):
        simplify(graph)
    return captured


@contextmanager
def _as_found(interface: Interface) -> Iterator[None]:
    with torch.no_grad(), plain_tensors_kept(interface.module), interface.context():
        yield


def _capture(interface: Interface, flat: FlatInterface, layers: tuple[str, ...]) -> Captured:
    recorder = PieceRecorder(flat.module, tuple(f"module.{name}" for name in layers), _weight_namer(interface))
    with ExitStack() as stack:
        if layers:
            stack.enter_context(recorder.recording())
        exported = _export(flat)
    captured = _read_export(exported, interface, flat)
    captured.pieces, captured.calls = recorder.pieces, recorder.calls
    return captured


# A recurrent layer keeps a list of its parameters, which torch.export fills with its own and then takes for a write.
_RECURRENT_LISTS: Final = r"The tensor attributes? (self\.[\w.]*_flat_weights\[\d+\](, )?)+ (was|were) assigned"


def _export(flat: FlatInterface) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings(), RecurrentLayersKept():
            warnings.filterwarnings("ignore", _RECURRENT_LISTS)
            return export_with_lengths(flat.module, flat.tensors, flat.dims)
    except (T2NError, PieceError):
        raise
    except Exception as error:
        name = type(flat.module.module).__name__
        raise CaptureError(f"torch.export cannot capture {name}: {type(error).__name__}: {error}") from error


def _weight_namer(interface: Interface) -> Any:  # noqa: ANN401 - a function of names
    """Names inside the flat module -> names of the weight owner."""
    start = ".".join(part for part in ("module", interface.prefix) if part) + "."

    def name(inside: str) -> str:
        return inside.removeprefix(start) if inside.startswith(start) else inside.removeprefix("module.")

    return name


def _read_export(exported: torch.export.ExportedProgram, interface: Interface, flat: FlatInterface) -> Captured:
    signature, graph = exported.graph_signature, exported.graph
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
