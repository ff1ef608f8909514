"""export_nnef: from a model to a checked archive in its folder."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t2n_hf.atomic import check_replaceable, staged_folder
from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import CaptureError, ConfigError, OutputExistsError, QuantizationError
from t2n_hf.export.bad_values import raise_bad_values
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.formats import is_transformers_model
from t2n_hf.export.module_interface import module_interface
from t2n_hf.export.origin import Origin, load, origin_of
from t2n_hf.export.package import write_archives, write_card, write_manifest, write_side_files
from t2n_hf.export.parts import Part
from t2n_hf.export.reference import bounds_of
from t2n_hf.export.report import ExportReport, Stopwatch, peak_rss_bytes
from t2n_hf.export.second_look import graph_of
from t2n_hf.export.verify import Verdict, verify_parts
from t2n_hf.export.weights import total_by_format
from t2n_hf.garbage import collection_paused
from t2n_hf.hf.one_at_a_time import ONE_AT_A_TIME
from t2n_hf.hf.tasks import ONE_GRAPH, Pipeline, pipeline_of
from t2n_hf.nnef.sinks import WrittenFile
from t2n_hf.nnef.versions import version_key
from t2n_hf.store.manifest import MANIFEST_NAME
from t2n_hf.trace.undo import changes_undone
from t2n_hf.trace.walk import modules_of
from t2n_hf.tract.version import require_tract

__all__ = ["export_nnef"]


@dataclass(frozen=True, kw_only=True)
class _Examples:
    """How a module is called, as `torch.export.export` is told."""

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None

    @property
    def given(self) -> bool:
        return self.args is not None or self.kwargs is not None

    def refuse_strays(self) -> None:
        strays = [name for name in ("dynamic_shapes", "input_names", "output_names") if getattr(self, name) is not None]
        if strays and not self.given:
            raise ConfigError(f"{', '.join(strays)} go with example_args or example_kwargs, which are missing")


def export_nnef(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,  # noqa: ANN401 - what torch.export takes
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tokenizer: Any = None,  # noqa: ANN401 - tokenizers have no common type
    dtype: Any = None,  # noqa: ANN401 - a torch dtype, or its name
    check: bool = True,
    weights: str | None = None,
    embeddings: str | None = None,
    lm_head: str | None = None,
    task: str | None = None,
    format: str = "tgz",
    overwrite: bool = False,
    all_logits: bool = False,
    capture: str = "auto",
    flat: bool = False,
    compression_level: int = 0,
    max_context: int | None = None,
    batch: bool = False,
    mask: bool = False,
    target: str | None = None,
    tolerance: float | None = None,
    device_map: Any = None,  # noqa: ANN401 - what from_pretrained takes
    max_memory: Mapping[int | str, int | str] | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Export a model to an NNEF archive for tract, checked against PyTorch, in a folder with all that runs it.

    Args:
        model: a loaded transformers model in any state of quantization and offloading, a checkpoint folder, a Hub
            id (both are loaded with their weights left on disk, unless `device_map` says otherwise), or any module
            together with `example_args` or `example_kwargs`.
        path: the export folder to make. It appears when it is complete; an older one survives any failure.
        example_args: positional arguments of the module, as for `torch.export.export`.
        example_kwargs: keyword arguments of the module.
        dynamic_shapes: which lengths are free, as for `torch.export.export`; the name of a `Dim` names its symbol.
        input_names: names of the tensors in the examples, in pytree order; default: by the parameters.
        output_names: names of the tensors in the result.
        tokenizer: a tokenizer (or processor), or a folder with its files; default: that of the checkpoint.
        dtype: numbers of the archive, "f32" or "f16" or a torch dtype; default: the model's, and f32 for a bf16 model.
        check: run the archive in tract, at lengths that were not traced, and compare it with PyTorch's exact path.
        weights: quantize matrices to this class: while loading, or, of a loaded model, while exporting ("q4_0").
        embeddings: the same for the token embeddings; "none" leaves them.
        lm_head: the same for the output layer.
        task: "text-generation", ...; default: by the model's class.
        format: "tgz", "tar" or "dir", an open folder.
        overwrite: replace an older export at `path`.
        all_logits: give the logits of every new position, not of the last one only.
        capture: "pieces" traces each distinct layer once, "whole" all of them, "auto" prefers pieces. "dispatch" runs
            the model once on its example, for what torch.export refuses: lengths are fixed, and what the model asks of
            its inputs' values is answered for good (`ExportReport.reads`); "auto" does so where it asks nothing.
        flat: write the graph without fragments.
        compression_level: of a tgz, 0 (stored) to 9.
        max_context: largest number of positions; default: the model's.
        batch: take several sequences at once, [B, S] (text-generation; other tasks always do).
        mask: take `attention_mask` [B, P+S] and, where the model does, `position_ids` [B, S], so that sequences may be
            padded on the left (text-generation; other tasks always take a mask).
        target: "tract==X.Y.Z": the archive has to run with this version of tract and later ones, so that nothing newer
            is used; default: the newest that is known. The manifest's `least_tract` says what came of it.
        tolerance: largest error that the check accepts, relative to the largest value of an output; default: 1e-4 for
            f32, 2e-2 for f16.
        device_map: where the weights of a checkpoint live while exporting; default: all on disk.
        max_memory: bytes by device, numbers or text: what `device_map="auto"` is made of; any other map keeps to them.
        spill_dir: folder of the private file that holds quantized weights until the check has read them again; it is
            made if it is missing, and stays. Default: the system's folder for temporary files.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: let code that comes with the checkpoint run.
        on_progress: called with (bytes written, bytes in all) while weights are written.

    The model is as before after any exit, and must not be used by other threads meanwhile. Exports of several threads
    are done one after the other.

    Raises:
        ConfigError: an option is unknown or does not fit the model.
        CheckpointNotFoundError: `model` names no checkpoint.
        OutputExistsError: `path` exists, and `overwrite` is not set, or it holds the model itself, or no export.
        CaptureError: the module cannot be captured.
        EmitError: a form of an operator that cannot be exported, or what the target does not run.
        MissingEmittersError: operators that cannot be exported; all of them, before anything is written.
        QuantizationError: weights hold NaN, or values that f16 cannot hold; all of them are named.
        FormatError: a weight is too large for a `.dat` file (4 GiB), by name, before anything is written.
        StorageError: a checkpoint is damaged, or the disk is full.
        CheckError: tract's results differ from PyTorch's beyond the tolerance.
        TractError: tract is not installed, or refused the archive.
    """
    config = ExportConfig(
        dtype=dtype,
        weights=weights,
        embeddings=embeddings,
        lm_head=lm_head,
        task=task,
        format=format,
        overwrite=overwrite,
        check=check,
        tolerance=tolerance,
        all_logits=all_logits,
        capture=capture,
        flat=flat,
        compression_level=compression_level,
        max_context=max_context,
        batch=batch,
        mask=mask,
        target=target,
    )
    examples = _Examples(
        args=example_args,
        kwargs=example_kwargs,
        dynamic_shapes=dynamic_shapes,
        input_names=input_names,
        output_names=output_names,
    )
    examples.refuse_strays()
    folder = Path(path)
    check_replaceable(folder, overwrite, MANIFEST_NAME)
    if check:
        require_tract()
    loading = {
        "device_map": device_map,
        "max_memory": max_memory,
        "spill_dir": spill_dir,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
    }
    # The model itself has tensors without values in the place of its own meanwhile.
    with ONE_AT_A_TIME, ExitStack() as paused:
        paused.enter_context(collection_paused())
        watch = Stopwatch()
        with watch.phase("load"):
            if isinstance(model, nn.Module):
                _refuse_loading_options(loading)
                module, origin = model, origin_of(model)
            else:
                module, origin, config = load(model, config, loading)
        _refuse_own_source(folder, origin)
        job = _Job(
            module=module,
            target=folder,
            config=config,
            examples=examples,
            origin=origin,
            tokenizer=tokenizer,
            on_progress=on_progress,
        )
        with changes_undone(modules_of(module)):
            return _export(job, watch, paused)


def _refuse_loading_options(options: Mapping[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: for loading a checkpoint, and this model is loaded already")


def _refuse_own_source(target: Path, origin: Origin) -> None:
    """Keep a checkpoint that lies in an older export from being deleted with it."""
    if origin.folder is None or not target.is_dir():
        return
    source = origin.folder.resolve()
    if target.resolve() in (source, *source.parents):
        raise OutputExistsError(f"{target} holds the model that is exported ({source}); export it to another place")


@dataclass(frozen=True, kw_only=True)
class _Job:
    module: nn.Module
    target: Path
    config: ExportConfig
    examples: _Examples
    origin: Origin
    tokenizer: Any
    on_progress: Callable[[int, int], None] | None


def _export(job: _Job, watch: Stopwatch, paused: ExitStack) -> ExportReport:
    """Make the graphs, write them and check them. `paused` ends when the graphs are made."""
    config = job.config.with_dtype(_dtype_of(job.module))
    pipeline = _pipeline(job, config)
    with watch.phase("graph"):
        parts = [
            Part(
                name=name,
                interface=interface,
                graph=graph_of(interface, config),
                archive=config.archive_name(name),
            )
            for name, interface in pipeline.parts.items()
        ]
        _refuse_fixed_parts(parts)
    paused.close()
    with staged_folder(job.target, overwrite=config.overwrite, marker=MANIFEST_NAME) as staging:
        with watch.phase("write"):
            files = _write_archives(staging, config, parts, job.on_progress)
            write_side_files(staging, pipeline.main.weight_owner, job.origin, job.tokenizer)
        with watch.phase("check"):
            verdict = verify_parts(pipeline, parts, config, staging)
        with watch.phase("finish"):
            needed = max((part.graph.least_tract for part in parts), key=version_key)
            least_tract = needed if verdict.result is not None else None
            manifest = write_manifest(
                staging, config, pipeline.task, parts, job.origin, least_tract=least_tract, archive_files=files
            )
            write_card(staging, manifest, job.origin)
    return _report(job, config, parts, verdict, watch)


def _write_archives(
    staging: Path, config: ExportConfig, parts: Sequence[Part], on_progress: Callable[[int, int], None] | None
) -> dict[str, WrittenFile]:
    try:
        return write_archives(staging, config, parts, on_progress)
    except QuantizationError:
        raise_bad_values(parts, staging)
        raise


def _refuse_fixed_parts(parts: Sequence[Part]) -> None:
    """Refuse parts that the capture could only take at the lengths of their examples: they would not meet."""
    fixed = [
        part.name
        for part in parts
        if len(parts) > 1 and bounds_of(part.interface.dynamic_shapes) and not part.graph.symbols
    ]
    if fixed:
        owner = type(parts[-1].interface.weight_owner).__name__
        raise CaptureError(
            f"{', '.join(fixed)} of {owner} can be captured at the lengths of one example only, and the parts of a "
            "model meet at any length; capture='whole' says what stands in the way"
        )


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype that holds most values."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _pipeline(job: _Job, config: ExportConfig) -> Pipeline:
    if job.examples.given:
        if config.batch or config.mask:
            raise ConfigError("batch and mask are for transformers models; say it with the examples and dynamic_shapes")
        interface = module_interface(
            job.module,
            args=job.examples.args or (),
            kwargs=job.examples.kwargs,
            dynamic_shapes=job.examples.dynamic_shapes,
            input_names=job.examples.input_names,
            output_names=job.examples.output_names,
        )
        return Pipeline(task=interface.task, parts={ONE_GRAPH: interface})
    if not is_transformers_model(job.module):
        raise ConfigError(
            f"{type(job.module).__name__} is no transformers model, so nothing says how it is called; "
            "give example_args or example_kwargs"
        )
    assert config.dtype is not None
    dtype = getattr(torch, dtype_named(config.dtype).torch)
    names = ("task", "all_logits", "max_context", "batch", "mask")
    options = {name: getattr(config, name) for name in names}
    return pipeline_of(job.module, dtype=dtype, **options)  # type: ignore[arg-type]


def _report(job: _Job, config: ExportConfig, parts: Sequence[Part], verdict: Verdict, watch: Stopwatch) -> ExportReport:
    result = verdict.result
    assert config.dtype is not None
    return ExportReport(
        folder=job.target,
        archive=job.target / parts[-1].archive,
        archives={part.name: job.target / part.archive for part in parts},
        dtype=config.dtype,
        check=verdict.status,
        max_abs_error=None if result is None else result.max_abs_error,
        max_rel_error=None if result is None else result.max_rel_error,
        tolerance=None if result is None else result.tolerance,
        seconds=watch.seconds(),
        peak_rss_bytes=peak_rss_bytes(),
        weight_bytes=sum(part.weight_bytes for part in parts),
        formats=total_by_format([weight for part in parts for weight in part.graph.weights]),
        dense={name: reason for part in parts for name, reason in part.graph.dense.items()},
        fixed_shapes=any(part.graph.fixed_shapes for part in parts),
        reads=tuple(dict.fromkeys(read for part in parts for read in part.graph.reads)),
    )
