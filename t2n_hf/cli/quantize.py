"""`t2n-hf quantize`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from t2n_hf.cli.options import parse_bytes, print_report, progress_bar, quiet_unless_watched
from t2n_hf.hf.quantize.checkpoint import quantize_checkpoint

__all__ = ["quantize"]

Option = typer.Option


def quantize(
    model: Annotated[str, typer.Argument(help="A folder with safetensors, or a Hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    *,
    weights: Annotated[str, Option(help="The class of matrices: q4_0, any installed class, or none.")] = "q4_0",
    embeddings: Annotated[str | None, Option(help="The same for the token embeddings. Default: float.")] = None,
    lm_head: Annotated[str | None, Option(help="The same for the output layer. Default: float.")] = None,
    skip: Annotated[
        list[str] | None, Option(help="A module to leave float; may be repeated. Default: as transformers has it.")
    ] = None,
    skip_nothing: Annotated[bool, Option("--skip-nothing", help="Leave no linear layer float.")] = False,
    importance: Annotated[
        Path | None, Option(help="How much each input channel matters: a file of t2n-hf calibrate.")
    ] = None,
    dtype: Annotated[str | None, Option(help="Of what stays float. Default: as it is stored.")] = None,
    task: Annotated[str | None, Option(help="Default: by the model's architecture.")] = None,
    max_shard_size: Annotated[str, Option(help="Largest file with weights, as in 5GB.")] = "50GB",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older folder of packed weights.")] = False,
    resume: Annotated[bool, Option(help="Go on with an interrupted run for the same model and options.")] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be done.")] = False,
    threads: Annotated[int | None, Option(min=1, help="Threads of PyTorch. Default: one per core.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a checkpoint, in little memory."""
    if skip and skip_nothing:
        raise typer.BadParameter("--skip and --skip-nothing exclude each other")
    quiet_unless_watched()
    if threads is not None:
        torch.set_num_threads(threads)
    with _Progress(hint="" if dry_run else "what is done is kept; the same command goes on with it") as progress:
        report = quantize_checkpoint(
            model,
            out,
            weights=weights,
            embeddings=embeddings,
            lm_head=lm_head,
            modules_to_not_convert=[] if skip_nothing else (skip or None),
            importance=importance,
            dtype=dtype,
            task=task,
            max_shard_size=parse_bytes(max_shard_size),
            overwrite=overwrite,
            resume=resume,
            dry_run=dry_run,
            revision=revision,
            trust_remote_code=trust_remote_code,
            on_progress=progress.update,
        )
    print_report(report, as_json)


class _Progress:
    """One bar for the bytes that are read, on a terminal only; and `hint`, when it is interrupted on the way."""

    def __init__(self, hint: str) -> None:
        self._bar: Any = None
        self._hint = hint
        self._begun = False

    def __enter__(self) -> "_Progress":
        return self

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are quantized, or passed on."""
        self._begun = True
        if not progress_bar():
            return
        if self._bar is None:
            # What an interrupted run has done counts as done, not as done quickly.
            self._bar = tqdm(
                total=total, initial=done, unit="B", unit_scale=True, desc="quantizing", file=sys.stderr, leave=False
            )
        self._bar.update(done - self._bar.n)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is KeyboardInterrupt and self._hint and self._begun:
            print(f"t2n-hf: {self._hint}", file=sys.stderr)
