"""`t2n-hf generate`: a checkpoint runs in PyTorch, an export runs in tract."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx2
import huggingface_hub
import torch
import transformers
import typer

from t2n_hf.cli.options import placement_options, progress_bar, quiet_unless_watched
from t2n_hf.errors import CheckpointNotFoundError, ConfigError
from t2n_hf.hf.loading import check_checkpoint, checkpoint_folder, load_checkpoint
from t2n_hf.hub import is_hub_id, pull_nnef_from_hub
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest
from t2n_hf.tract.model import TractModelForCausalLM
from t2n_hf.tract.seq2seq import TractModelForSeq2SeqLM

__all__ = ["generate"]

Option = typer.Option


def generate(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id: of an export, or of a checkpoint.")],
    *,
    prompt: Annotated[str, Option(help="Text to continue; - reads it from standard input.")],
    chat: Annotated[bool, Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, Option(min=1, help="Stop after that many tokens.")] = 128,
    sample: Annotated[bool, Option("--sample", help="Sample instead of taking the likeliest token.")] = False,
    temperature: Annotated[float | None, Option(help="With --sample.")] = None,
    top_p: Annotated[float | None, Option(help="With --sample.")] = None,
    seed: Annotated[int | None, Option(help="With --sample: the same seed gives the same text.")] = None,
    weights: Annotated[str | None, Option(help="Checkpoint only: quantize matrices on load.")] = None,
    embeddings: Annotated[str | None, Option(help="Checkpoint only: quantize the token embeddings on load.")] = None,
    dtype: Annotated[str | None, Option(help="Checkpoint only: f32, f16 or bf16. Default: the checkpoint's.")] = None,
    device_map: Annotated[str | None, Option(help="Checkpoint only: disk, cpu, auto or JSON.")] = None,
    max_memory: Annotated[
        list[str] | None, Option(help="Checkpoint only: DEVICE=SIZE, what weights may take there.")
    ] = None,
    spill_dir: Annotated[Path | None, Option(help="Checkpoint only: folder for what is quantized on disk.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> None:
    """Continue a prompt with a checkpoint or an export; the text goes to standard output as it comes."""
    export = _export_folder(model, revision)
    loading: dict[str, Any] = {
        "weights": weights,
        "embeddings": embeddings,
        "dtype": dtype,
        **placement_options(device_map, max_memory),
        "spill_dir": spill_dir,
    }
    given = [name for name, value in loading.items() if value is not None]
    if export is not None and given:
        raise ConfigError(
            f"{', '.join(given)} is for checkpoints; {model} is an export, whose weights are what they are"
        )
    sampling = _sampling(sample=sample, temperature=temperature, top_p=top_p, seed=seed)
    remote: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    quiet_unless_watched()
    text = sys.stdin.read() if prompt == "-" else prompt
    if export is not None:
        tokenizer = _tokenizer(str(export), trust_remote_code=False)
        with _runner_of(export) as loaded:
            _run(loaded, tokenizer, _encode(tokenizer, text, chat=chat), {"max_new_tokens": max_new_tokens, **sampling})
        return
    if checkpoint_folder(model, revision) == Path(model):  # what lacks is told before a tokenizer is looked for
        check_checkpoint(model)
    tokenizer = _tokenizer(model, **remote)
    inputs = _encode(tokenizer, text, chat=chat)
    _run(load_checkpoint(model, **loading, **remote), tokenizer, inputs, {"max_new_tokens": max_new_tokens, **sampling})


def _runner_of(export: Path) -> TractModelForCausalLM | TractModelForSeq2SeqLM:
    """Load an export that takes text. Raises ConfigError for one that takes images or sounds."""
    manifest = ExportManifest.read(export)
    if not manifest.parts:
        return TractModelForCausalLM.from_pretrained(export)
    first = manifest.parts[0]["inputs"][0]["name"]
    if first != "input_ids" or set(manifest.archives) != {"encoder", "decoder"}:
        raise ConfigError(
            f"{export} takes {first}, not a text alone: use TractModelForSeq2SeqLM (an encoder and a decoder) or "
            "TractModelForImageTextToText in Python, with the processor of the model"
        )
    return TractModelForSeq2SeqLM.from_pretrained(export)


def _export_folder(model: str, revision: str | None) -> Path | None:
    """Find the export that `model` names, fetching it from the Hub when it is there; None: it is a checkpoint."""
    if Path(model).exists():
        return Path(model) if (Path(model) / MANIFEST_NAME).is_file() else None
    if not is_hub_id(model) or not _is_on_hub(model, revision):
        return None
    return pull_nnef_from_hub(model, revision)


def _is_on_hub(repo_id: str, revision: str | None) -> bool:
    try:
        return huggingface_hub.file_exists(repo_id, MANIFEST_NAME, revision=revision)
    except (OSError, httpx2.HTTPError):
        return False  # offline: the loader says what it makes of the name


def _sampling(*, sample: bool, temperature: float | None, top_p: float | None, seed: int | None) -> dict[str, Any]:
    options = {name: value for name, value in (("temperature", temperature), ("top_p", top_p)) if value is not None}
    if not sample and (options or seed is not None):
        raise typer.BadParameter("--temperature, --top-p and --seed need --sample")
    if seed is not None:
        torch.manual_seed(seed)
    return {"do_sample": sample, **options}


def _tokenizer(model: str, **remote: Any) -> Any:  # noqa: ANN401 - a transformers tokenizer
    try:
        return transformers.AutoTokenizer.from_pretrained(model, **remote)
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(f"cannot load a tokenizer from {model}: {error}") from error


def _encode(tokenizer: Any, text: str, *, chat: bool) -> Any:  # noqa: ANN401 - transformers types
    if not chat:
        return tokenizer(text, return_tensors="pt")
    if not tokenizer.chat_template:
        raise ConfigError("this model has no chat template; leave --chat out")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _run(model: Any, tokenizer: Any, inputs: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - transformers types
    translates = model.config.is_encoder_decoder  # its prompt is no beginning of what it writes
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=not translates, skip_special_tokens=True)
    start = time.perf_counter()
    with torch.no_grad():
        tokens = model.generate(**inputs.to(model.device), streamer=streamer, **options)
    count = tokens.shape[-1] - (1 if translates else inputs["input_ids"].shape[-1])
    if progress_bar():
        seconds = time.perf_counter() - start
        print(f"{count} tokens in {seconds:.1f} s, prompt included", file=sys.stderr)
