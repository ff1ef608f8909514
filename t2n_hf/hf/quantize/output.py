"""The folder of a quantized checkpoint: whether it may be made, and what is in it beside the weights."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers.utils import logging

from t2n_hf.atomic import check_replaceable
from t2n_hf.errors import OutputExistsError
from t2n_hf.hf.companions import carry_companions, companions_of
from t2n_hf.hf.config import QUANT_METHOD, T2NConfig
from t2n_hf.hf.quantize.plan import OutputPlan
from t2n_hf.hf.saving import disown, write_note
from t2n_hf.hf.stored import StoredForm, StoredForms
from t2n_hf.store.checkpoint import CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_target", "write_side_files"]

_INDEX: Final = "model.safetensors.index.json"
_OURS: Final = ("*.safetensors", _INDEX, "config.json", "generation_config.json", "*.py", "additional_chat_templates")


def check_target(target: Path, *, source: str | Path, overwrite: bool, stored: CheckpointIndex | None = None) -> None:
    """Raise OutputExistsError when `target` may not be made, or replaced; StorageError when its parent is no folder.

    Only a folder of packed weights, with nothing else in it, is replaced, and never the one that is read from.
    """
    source = Path(source)
    if target.exists() and source.exists() and target.samefile(source):
        raise OutputExistsError(f"{target} is the model itself; choose another place for the quantized one")
    check_replaceable(target, overwrite, None)
    if not target.exists():
        return
    foreign = _foreign(target)
    if foreign:
        raise OutputExistsError(f"{target} {foreign}; it is not overwritten: choose another place")
    inside = target.resolve()
    for file in stored.files if stored is not None else ():
        if inside in file.path.resolve().parents:
            raise OutputExistsError(f"{target} holds {file.path.name}, which is read from; choose another place")


def _foreign(folder: Path) -> str | None:
    """Say what keeps a folder from being one of packed weights and nothing else; None when it is, or is empty."""
    entries = sorted(folder.iterdir())
    if not entries:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError):
        method = None
    if method != QUANT_METHOD:
        return "has no config.json of packed weights, so it is not an older output"
    known = {path.relative_to(folder).parts[0] for path in companions_of(folder)}
    others = [path.name for path in entries if path.name not in known and not any(fnmatch(path.name, p) for p in _OURS)]
    return f"holds {', '.join(others[:3])}, which does not belong to an older output" if others else None


def write_side_files(
    folder: Path,
    model: "PreTrainedModel",
    config: T2NConfig,
    plan: OutputPlan,
    forms: Mapping[str, StoredForm],
    source: Path | None,
) -> None:
    """Fill `folder` with all but the weights: what save_pretrained of the packed model writes there.

    `source` is a folder whose tokenizer, licence and card are carried over.
    """
    if source is not None:
        carry_companions(source, folder)
    saved = copy.deepcopy(config)
    saved.tensors = StoredForms({weight.name: forms[weight.name] for weight in plan.weights if weight.form}).to_json()
    disown(model)
    model.__dict__.pop("hf_quantizer", None)
    model.config.quantization_config = saved
    with _no_progress():
        # Without weights, and so without the bar for writing them.
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
    if plan.index is not None:
        content: Any = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        (folder / _INDEX).write_text(content, encoding="utf-8")
    write_note(folder / "README.md")


@contextmanager
def _no_progress() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
