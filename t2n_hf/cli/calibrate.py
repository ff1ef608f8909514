"""`t2n-hf calibrate`."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from t2n_hf.cli.options import print_json, quiet_unless_watched
from t2n_hf.errors import FormatError, OutputExistsError
from t2n_hf.hf.calibration.run import WINDOW_TOKENS
from t2n_hf.hf.calibration.run import calibrate as run_calibration

__all__ = ["calibrate"]

Option = typer.Option


def calibrate(
    model: Annotated[str, typer.Argument(help="A folder with safetensors, or a Hub id.")],
    out: Annotated[Path, typer.Argument(help="The file to make, for quantize --importance.")],
    *,
    text: Annotated[list[Path], Option(help="A file of text (UTF-8) like what the model is for; may be repeated.")],
    max_tokens: Annotated[int | None, Option(min=1, help="Stop after so many tokens. Default: all.")] = None,
    window: Annotated[int, Option(min=1, help="Tokens that are run at once.")] = WINDOW_TOKENS,
    batch_size: Annotated[int, Option(min=1, help="Windows that are run side by side.")] = 1,
    dtype: Annotated[str | None, Option(help="To compute in. Default: as it is stored.")] = None,
    task: Annotated[str | None, Option(help="Default: by the model's architecture.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older file.")] = False,
    threads: Annotated[int | None, Option(min=1, help="Threads of PyTorch. Default: one per core.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure which channels of a model's weights matter, for quantize."""
    if out.exists() and not overwrite:
        raise OutputExistsError(f"{out} exists; remove it, or give --overwrite")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no folder")
    texts = [_read(path) for path in text]
    quiet_unless_watched()
    if threads is not None:
        torch.set_num_threads(threads)
    options: dict[str, Any] = {"dtype": dtype, "task": task, "revision": revision}
    found = run_calibration(
        model,
        texts,
        max_tokens=max_tokens,
        window=window,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
        **{name: value for name, value in options.items() if value is not None},
    )
    found.save(out)
    if as_json:
        print_json({"file": str(out), "weights": len(found), "tokens": found.tokens, "source": found.source})
    else:
        print(f"{out}: {len(found)} weights of {found.source}, measured on {found.tokens} tokens")


def _read(path: Path) -> str:
    """Read a text. Raises OSError when there is none, FormatError when it is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
