"""quantize_checkpoint: a checkpoint of plain weights becomes one of packed weights, one weight at a time.

The model is never built: it is loaded on meta, which tells what the loader makes of each stored tensor, and values are
then read, quantized and written in turn (`plan`, `values`, `work`).
"""

import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from t2n_hf.atomic import kept_folder, partial_path
from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import CheckpointNotFoundError, ConfigError, StorageError
from t2n_hf.hf.calibration.importance import importance_for
from t2n_hf.hf.companions import fetch_companions
from t2n_hf.hf.config import NOT_QUANTIZED, T2NConfig
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.hf.quantize.journal import fingerprint
from t2n_hf.hf.quantize.output import check_target, write_side_files
from t2n_hf.hf.quantize.plan import OutputPlan, make_output_plan
from t2n_hf.hf.quantize.report import QuantizeReport, rows_of, stored_nbytes
from t2n_hf.hf.quantize.values import UnitMaker
from t2n_hf.hf.quantize.work import GrowingFolder, disk_needed, empty
from t2n_hf.hf.quantizer import COVERAGE_THRESHOLD
from t2n_hf.store.checkpoint import CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["quantize_checkpoint"]

# After one of these another run may go on where this one stopped; after any other error it would fail again.
_PASSING: Final = (OSError, MemoryError, KeyboardInterrupt)

Progress = Callable[[int, int], None]


def quantize_checkpoint(
    path_or_id: str | Path,
    out: str | Path,
    *,
    weights: str | None = None,
    embeddings: str | None = None,
    lm_head: str | None = None,
    modules_to_not_convert: Iterable[str] | None = None,
    config: T2NConfig | None = None,
    importance: Mapping[str, torch.Tensor] | str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    task: str | None = None,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    on_progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint into a new folder, one weight at a time, in the memory of about two of its tensors.

    The folder holds, byte for byte, what `save_pretrained` writes of the model that is loaded with the same T2NConfig,
    and the tokenizer and licence files of the source. `from_pretrained` loads it after `import t2n_hf`.

    A run that is interrupted, killed included, leaves a hidden folder beside `out`; the next one for the same source
    and options goes on with it, to the same bytes. One for another source or other options starts over.

    Args:
        path_or_id: a folder with safetensors, in one file or in shards, or an id of the Hub (which is downloaded).
        out: the folder to make.
        weights: as for T2NConfig, like `embeddings`, `lm_head` and `modules_to_not_convert`; None is "q4_0".
        embeddings: see `weights`.
        lm_head: see `weights`.
        modules_to_not_convert: see `weights`.
        config: all of these at once, in their place. Its `compute` is noted in config.json and changes nothing here.
        importance: what `calibrate` measured, for classes that use it, or its file: f32 (K,) by parameter name, one
            value for each input channel ((E, K) for E fused experts). None: what the config names.
        dtype: of weights that stay float, and what packed ones act as; None: as the model is stored.
        task: which head the model has, one of hf.tasks.TASKS; None: the class that the checkpoint names.
        max_shard_size: of one file with weights, as for save_pretrained.
        overwrite: replace `out` when it is a folder of packed weights, and nothing else.
        resume: False starts over, whatever an interrupted run has done.
        dry_run: only report what would be done.
        revision: branch, tag or commit of a Hub id.
        token: for the Hub, as everywhere in Hugging Face.
        trust_remote_code: run code that comes with the model.
        on_progress: called with bytes read so far, and in all, after each weight.

    Raises CheckpointNotFoundError without safetensors weights, ConfigError for options that contradict each other or
    the checkpoint (quantized already, nothing to quantize), OutputExistsError, QuantizationError naming a weight with
    NaN or infinity, StorageError when the disk is too small or full, a folder cannot be written to, or the source
    changes meanwhile. Whatever it is, `out` is as it was before.
    """
    began = time.perf_counter()
    target = Path(out)
    config = _one_config(config, weights, embeddings, lm_head, modules_to_not_convert)
    check_target(target, source=path_or_id, overwrite=overwrite)
    hub = {"revision": revision, "token": token}
    model, files = _on_meta(path_or_id, dtype=dtype, task=task, trust_remote_code=trust_remote_code, **hub)
    stored = CheckpointIndex.open(files)
    try:
        plan = make_output_plan(model, config, stored, max_shard_size)
        values = _importance(config.importance if importance is None else importance, model, plan)
        report = _foreseen(str(path_or_id), target, plan)
        _look_at_coverage(report, config)
        if not dry_run:
            companions = _companions(path_or_id, model, **hub)
            run = _Run(model=model, config=config, plan=plan, stored=stored, importance=values, companions=companions)
            report = run.into(target, (path_or_id, overwrite), report, resume=resume, on_progress=on_progress)
    finally:
        stored.close()
    return replace(report, seconds=time.perf_counter() - began, dry_run=dry_run)


def _one_config(config: T2NConfig | None, *options: Any) -> T2NConfig:  # noqa: ANN401 - as T2NConfig takes them
    if config is None:
        weights, embeddings, lm_head, left_out = options
        weights = "q4_0" if weights is None else weights
        return T2NConfig(weights, embeddings=embeddings, lm_head=lm_head, modules_to_not_convert=left_out)
    if any(option is not None for option in options):
        raise ConfigError("config= already says weights, embeddings, lm_head and modules_to_not_convert; give one")
    if not isinstance(config, T2NConfig):
        raise ConfigError(f"config is a {type(config).__name__}; expected a T2NConfig")
    return config


def _on_meta(
    path_or_id: str | Path,
    **options: Any,  # noqa: ANN401 - for from_pretrained
) -> tuple["PreTrainedModel", tuple[Path, ...]]:
    """Load the model without its values, as the loader would with them; also give the files that they are in."""
    options["dtype"] = _float_type(options["dtype"])
    if not Path(path_or_id).exists():
        options["use_safetensors"] = True
    try:
        model = load_checkpoint(path_or_id, device_map={"": "meta"}, **options)
    except CheckpointNotFoundError:
        raise
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise CheckpointNotFoundError(
            f"{path_or_id} has no weights in safetensors: {str(error).splitlines()[0]} Only those are read; take a "
            "revision that has them, or load the model with transformers and use save_pretrained"
        ) from error
    quantizer: Any = model.hf_quantizer
    if quantizer.pre_quantized:
        raise ConfigError(f"{path_or_id} is quantized already; take the plain weights")
    return model, quantizer.source_files


def _float_type(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Find a float type by its name in torch or tract; None and "auto" keep that of the checkpoint."""
    if dtype is None or dtype == "auto":
        return None
    found: torch.dtype = getattr(torch, dtype_of(dtype).torch)
    if not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} is no float type; expected for example 'bfloat16'")
    return found


def _importance(
    given: Mapping[str, torch.Tensor] | str | Path | None, model: "PreTrainedModel", plan: OutputPlan
) -> dict[str, torch.Tensor]:
    """Read importance, and keep what is for weights that are quantized. Raises ConfigError for another model's."""
    if given is not None and not isinstance(given, (str, Path, Mapping)):
        raise ConfigError(f"importance is a {type(given).__name__}; expected tensors by parameter name, or a path")
    choices = {weight.name: weight.choice for weight in plan.weights if weight.form is not None}
    return importance_for(model, choices, given)


def _companions(path_or_id: str | Path, model: "PreTrainedModel", **hub: Any) -> Path | None:  # noqa: ANN401
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    commit = getattr(model.config, "_commit_hash", None) or hub["revision"]
    return fetch_companions(str(path_or_id), commit, hub["token"])


def _foreseen(source: str, target: Path, plan: OutputPlan) -> QuantizeReport:
    before: Counter[str] = Counter()
    for unit in plan.units:
        for _, found in unit.sources:
            before[found.dtype] += found.nbytes
    return QuantizeReport(
        source=source,
        out=str(target),
        coverage=rows_of(plan),
        before=dict(before.most_common()),
        bytes_after=plan.nbytes,
        files=tuple(plan.files),
        stored=stored_nbytes(plan),
        disk_needed=disk_needed(plan, partial_path(target)),
        disk_free=shutil.disk_usage(target.absolute().parent).free,
        largest_read=max((unit.step_nbytes for unit in plan.units), default=0),
    )


def _look_at_coverage(report: QuantizeReport, config: T2NConfig) -> None:
    """Raise ConfigError when nothing would be quantized; warn, as loading does, when it is little."""
    if any(row.quantized for row in report.coverage.rows):
        if config.weights != NOT_QUANTIZED and report.coverage.share < COVERAGE_THRESHOLD:
            warnings.warn(
                f"only {report.coverage.share:.0%} of the values that could be quantized are: "
                f"{'; '.join(report.coverage.main_reasons())}",
                stacklevel=3,
            )
        return
    asked = {config.weights, config.embeddings, config.lm_head} - {None, NOT_QUANTIZED}
    if not asked:
        raise ConfigError("weights, embeddings and lm_head leave everything float: there is nothing to quantize")
    why = "; ".join(report.coverage.main_reasons()) or "all of it is left out by options"
    raise ConfigError(f"nothing of {report.source} can be quantized to {', '.join(sorted(map(str, asked)))}: {why}")


@dataclass(kw_only=True)
class _Run:
    """One output on its way."""

    model: "PreTrainedModel"
    config: T2NConfig
    plan: OutputPlan
    stored: CheckpointIndex
    importance: dict[str, torch.Tensor]
    companions: Path | None

    def into(
        self,
        target: Path,
        source: tuple[str | Path, bool],
        report: QuantizeReport,
        *,
        resume: bool,
        on_progress: Progress | None,
    ) -> QuantizeReport:
        """Write `target`; `source` are the model's place and whether an older output is replaced."""

        def check(path: Path) -> None:
            check_target(path, source=source[0], overwrite=source[1], stored=self.stored)

        try:
            with kept_folder(target, check) as partial:
                return self._fill(partial, report, resume, on_progress or (lambda done, total: None))
        except PermissionError as error:
            raise StorageError(
                error.errno, f"{target.absolute().parent} cannot be written to ({error.strerror}); choose another place"
            ) from error

    def _fill(self, partial: Path, report: QuantizeReport, resume: bool, on_progress: Progress) -> QuantizeReport:
        try:
            with GrowingFolder(partial, self.plan, self._identity(), resume=resume) as growing:
                if growing.found_other_work:
                    warnings.warn(
                        f"{partial} held work for another source or other options: starting over", stacklevel=5
                    )
                there = sum(growing.plan.nbytes_of(entry.checksums) for entry in growing.entries.values())
                self._make_units(growing, on_progress)
                for file in self.stored.files:
                    file.verify()
                growing.finish(lambda folder: self._side_files(folder, growing))
                errors = {name: error for entry in growing.entries.values() for name, error in entry.errors.items()}
        except BaseException as error:
            if not isinstance(error, _PASSING):
                empty(partial)
            raise
        return replace(report, coverage=rows_of(self.plan, errors), bytes_resumed=there)

    def _identity(self) -> str:
        facts = {
            "config": self.config.to_dict(),
            "dtype": str(self.plan.dtype),
            "files": {name: layout.header.hex() for name, layout in self.plan.files.items()},
            "versions": {name: version(name) for name in ("t2n-hf", "torch", "transformers")},
        }
        return fingerprint(self.stored, self.importance, facts)

    def _make_units(self, growing: GrowingFolder, on_progress: Progress) -> None:
        maker = UnitMaker(self.model, self.plan.dtype, self.importance, growing.append)
        total = self.plan.nbytes_read
        left = [unit for unit in self.plan.units if unit.name not in growing.entries]
        done = total - sum(unit.nbytes for unit in left)
        for number, unit in enumerate(left):
            for following in left[number + 1 : number + 2]:
                following.announce(0)
            growing.begin(unit)
            growing.end(unit, maker.make(unit))
            done += unit.nbytes
            on_progress(done, total)

    def _side_files(self, folder: Path, growing: GrowingFolder) -> None:
        forms = {name: form for entry in growing.entries.values() for name, form in entry.forms.items()}
        write_side_files(folder, self.model, self.config, self.plan, forms, self.companions)
