"""The check of an export: references from PyTorch, then the archive in tract."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from t2n_hf.export.check import CheckResult, available_bytes, check_archive, why_skipped
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import Graph
from t2n_hf.export.reference import Step, bounds_of, exact_tensors, plan_lengths, run_references
from t2n_hf.hf.plan import Choice
from t2n_hf.trace.interface import Interface

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of the check: `status` is "passed" or "skipped: <why>"; `result` is None when skipped."""

    status: str
    result: CheckResult | None = None


def verify(interface: Interface, graph: Graph, config: ExportConfig, archive: Path) -> Verdict:
    """Run the model and the archive and compare them. Raises CheckError, TractError."""
    if not config.check:
        return Verdict(status="skipped: not asked for")
    largest = max((p.numel() * 4 for p in interface.weight_owner.parameters()), default=0)
    weight_bytes = sum(weight.nbytes for weight in graph.weights)
    why = why_skipped(weight_bytes, largest, available_bytes())
    if why is not None:
        return Verdict(status=f"skipped: {why}")
    assert config.dtype is not None
    steps = _references(interface, graph)
    gc.collect()  # modules and hooks refer to each other; tract loads beside what is left
    result = check_archive(
        archive, graph.specs, steps, dtype=config.dtype, tolerance=config.tolerance, weight_bytes=weight_bytes
    )
    return Verdict(status="passed", result=result)


def _references(interface: Interface, graph: Graph) -> list[Step]:
    calls = plan_lengths(graph.specs, bounds_of(interface.dynamic_shapes), interface.extra)
    tensors = exact_tensors(interface.module, _quantized_while_exporting(interface, graph))
    return run_references(interface, graph.specs, calls, tensors)


def _quantized_while_exporting(interface: Interface, graph: Graph) -> Mapping[str, Choice]:
    """Names inside the interface's module -> how the archive holds them, though the module does not."""
    start = f"{interface.prefix}." if interface.prefix else ""
    written = {weight.name: weight.format for weight in graph.weights}
    chosen = {name: choice.quantize_as for name, choice in graph.choices.items() if choice.quantize_as is not None}
    # A weight that an operator needed dense is written as the model holds it.
    return {
        f"{start}{name}": choice
        for name, choice in chosen.items()
        if choice is not None and written.get(name, "") not in {"f32", "f16"}
    }
