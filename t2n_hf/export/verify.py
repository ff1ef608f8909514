"""The check of an export: references from PyTorch, then the archive in tract."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from t2n_hf.export.check import CheckResult, available_bytes, check_archive, why_skipped
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import Graph
from t2n_hf.export.parts import Part
from t2n_hf.export.reference import Step, bounds_of, exact_tensors, plan_lengths, run_references
from t2n_hf.export.whole import check_whole
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.tasks import Pipeline
from t2n_hf.trace.interface import Interface

__all__ = ["Verdict", "references_of", "verify_parts"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of the check: `status` is "passed" or "skipped: <why>"; `result` is None when skipped."""

    status: str
    result: CheckResult | None = None


def verify_parts(pipeline: Pipeline, parts: Sequence[Part], config: ExportConfig, staging: Path) -> Verdict:
    """Compare each part with PyTorch, and then the whole, when it generates. Raises CheckError, TractError."""
    if not config.check:
        return Verdict(status="skipped: not asked for")
    largest = max((p.numel() * 4 for p in pipeline.main.weight_owner.parameters()), default=0)
    weight_bytes = sum(part.weight_bytes for part in parts)
    why = why_skipped(weight_bytes, largest, available_bytes())
    if why is not None:
        return Verdict(status=f"skipped: {why}")
    results = [_check_part(part, config, staging) for part in parts]
    if pipeline.answer is not None:
        results.append(check_whole(pipeline, parts, config, staging, _exact(parts)))
    return Verdict(
        status="passed",
        result=CheckResult(
            max_abs_error=max(result.max_abs_error for result in results),
            max_rel_error=max(result.max_rel_error for result in results),
            tolerance=results[0].tolerance,
            steps=sum(result.steps for result in results),
        ),
    )


def _check_part(part: Part, config: ExportConfig, staging: Path) -> CheckResult:
    assert config.dtype is not None
    steps = references_of(part)
    gc.collect()  # modules and hooks refer to each other; tract loads beside what is left
    return check_archive(
        staging / part.archive,
        part.graph.specs,
        steps,
        dtype=config.dtype,
        tolerance=config.tolerance,
        weight_bytes=part.weight_bytes,
    )


def references_of(part: Part) -> list[Step]:
    """Run PyTorch at lengths that were not traced, with the weights as the archive holds them."""
    interface, specs = part.interface, part.graph.specs
    calls = plan_lengths(specs, bounds_of(interface.dynamic_shapes), interface.extra)
    return run_references(interface, specs, calls, _exact([part]))


def _exact(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """Tensors of the first part's module, as all of these parts hold them together."""
    quantized = {
        name: choice
        for part in parts
        for name, choice in _quantized_while_exporting(part.interface, part.graph).items()
    }
    return exact_tensors(parts[0].interface.module, quantized)


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
