"""`t2n-hf export`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from t2n_hf.cli.options import placement_options, print_report, progress_bar, quiet_unless_watched
from t2n_hf.export import export_nnef

__all__ = ["export"]

Option = typer.Option


def export(
    model: Annotated[str, typer.Argument(help="A Hub id, or a folder with a checkpoint.")],
    out: Annotated[str, typer.Argument(help="The export folder to make.")],
    *,
    weights: Annotated[str | None, Option(help="Quantize matrices: q4_0, or any installed class.")] = None,
    embeddings: Annotated[str | None, Option(help="The same for the token embeddings.")] = None,
    lm_head: Annotated[str | None, Option(help="The same for the output layer.")] = None,
    dtype: Annotated[
        str | None, Option(help="Numbers of the archive: f32 or f16. Default: the model's, f32 for bf16.")
    ] = None,
    task: Annotated[
        str | None, Option(help="What the model is for (text2text-generation...). Default: by its architecture.")
    ] = None,
    device_map: Annotated[
        str, Option(help='Where weights live: disk, cpu, auto, or JSON ({"lm_head": "cpu"}).')
    ] = "disk",
    max_memory: Annotated[list[str] | None, Option(help="DEVICE=SIZE (cpu=2GB): what weights may take.")] = None,
    spill_dir: Annotated[Path | None, Option(help="Folder for a temporary file. Default: the system's.")] = None,
    format: Annotated[str, Option(help="tgz, tar or dir (an open folder).")] = "tgz",
    level: Annotated[int, Option(help="Compression of a tgz, 0 to 9.")] = 0,
    max_context: Annotated[int | None, Option(help="Largest number of positions. Default: the model's.")] = None,
    all_logits: Annotated[bool, Option("--all-logits", help="Logits of every position, not of the last one.")] = False,
    batch: Annotated[bool, Option("--batch", help="Take several sequences at once (text generation).")] = False,
    mask: Annotated[
        bool, Option("--mask", help="Take a mask and positions: sequences padded on the left (text generation).")
    ] = False,
    target: Annotated[str | None, Option(help="tract==X.Y.Z, the oldest tract that has to run the archive.")] = None,
    capture: Annotated[str, Option(help="auto, pieces, whole or dispatch (fixed lengths).")] = "auto",
    flat: Annotated[bool, Option("--flat", help="Write the graph without fragments.")] = False,
    check: Annotated[bool, Option(help="Run the archive in tract and compare it with PyTorch.")] = True,
    tolerance: Annotated[float | None, Option(help="Largest relative error that the check accepts.")] = None,
    threads: Annotated[
        int, Option(min=1, help="Threads of PyTorch; more than one only help quantizing and checking large models.")
    ] = 1,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older export.")] = False,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Export a model to an NNEF archive for tract."""
    quiet_unless_watched()
    # Many small operations: idle threads that wait for the next one by spinning can double the time on shared cores.
    torch.set_num_threads(threads)
    with _Progress(check=check) as progress:
        report = export_nnef(
            model,
            out,
            weights=weights,
            embeddings=embeddings,
            lm_head=lm_head,
            dtype=dtype,
            task=task,
            **placement_options(device_map, max_memory),
            spill_dir=spill_dir,
            format=format,
            compression_level=level,
            max_context=max_context,
            all_logits=all_logits,
            batch=batch,
            mask=mask,
            target=target,
            capture=capture,
            flat=flat,
            check=check,
            tolerance=tolerance,
            overwrite=overwrite,
            revision=revision,
            trust_remote_code=trust_remote_code,
            on_progress=progress.update,
        )
    print_report(report, as_json)


class _Progress:
    """One bar for the weights, then a word on the check, which takes longest; on a terminal only."""

    def __init__(self, *, check: bool) -> None:
        self._check = check
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        return self

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are written."""
        if not progress_bar():
            return
        if self._bar is None:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="writing", file=sys.stderr, leave=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            if self._check:
                print("checking: PyTorch first, then the archive in tract ...", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
