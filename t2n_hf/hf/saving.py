"""Saving a packed model in safetensors, with a note for who opens the folder."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import OutputExistsError
from t2n_hf.hf.hooks import resident_nbytes
from t2n_hf.hf.one_at_a_time import ONE_AT_A_TIME
from t2n_hf.hf.report import coverage_of
from t2n_hf.hf.stored import StoredForm, StoredForms, key_of_part
from t2n_hf.hf.weights import held_nbytes, tied_names
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor, opaque_to_final_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NOTE", "adopt", "disown", "packed_state_dict", "state_class", "state_of", "write_note"]

NOTE: Final = """\
## Loading

The weights in this folder are packed by [t2n_hf](https://pypi.org/project/t2n-hf/). Import it before loading:

```python
import t2n_hf  # without it transformers does not know these weights, and starts from random ones
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("<this folder or repository>")
```

Without `import t2n_hf`, transformers warns of an "Unknown quantization type, got t2n", skips the packed weights and
leaves random values in their place.
"""
_FRONT_MATTER: Final = "---\nlibrary_name: transformers\ntags:\n- t2n_hf\n---\n\n"
_CARD: Final = "README.md"
_ADOPTED: Final = ("save_pretrained", "get_memory_footprint", "t2n_report")


def state_of(tensor: torch.Tensor) -> OffloadState | None:
    """Give the offload state of a packed tensor, read from disk if it is there; None for a tensor of plain values."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.stored_state()
    return tensor.to_offload_state() if isinstance(tensor, SupportsOffloadState) else None


def state_class(tensor: torch.Tensor) -> type | None:
    """Give the class that a parameter is packed in, None for plain values; nothing is read."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.inner_class
    return type(tensor) if isinstance(tensor, SupportsOffloadState) else None


def packed_state_dict(model: "PreTrainedModel") -> tuple[dict[str, torch.Tensor], StoredForms]:
    """Give the state dict to save, packed weights as their parts, and what those parts are.

    A tied table is there once, under the name that loading looks for.
    """
    canonical = tied_names(model)
    tensors: dict[str, torch.Tensor] = {}
    forms: dict[str, StoredForm] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, OpaqueTensor):
            tensors[name] = value.detach() if isinstance(value, torch.Tensor) else value
            continue
        if canonical.get(name, name) != name:
            continue
        state = state_of(value)
        if state is None:
            tensors[name] = _plain_values(value)
            continue
        forms[name] = StoredForm(state["tag"], tuple(sorted(state["tensors"])), state["meta"])
        tensors.update({key_of_part(name, part): tensor for part, tensor in state["tensors"].items()})
    return tensors, StoredForms(forms)


def _plain_values(tensor: OpaqueTensor) -> torch.Tensor:
    """Give values to write out: over mapped pages of the user's file where they are there as they are, else read."""
    found = tensor.source_range if isinstance(tensor, OffloadedTensor) else None
    if found is not None and dtype_of(tensor.dtype).name == found.dtype:
        return found.mapped().view(tensor.shape)
    return opaque_to_final_tensor(tensor)


def adopt(model: "PreTrainedModel") -> None:
    """Let methods of this one model tell the truth about packed weights: what became of them, how they are saved."""
    model.t2n_report = MethodType(coverage_of, model)  # type: ignore[assignment]
    model.get_memory_footprint = MethodType(_memory_footprint, model)  # type: ignore[method-assign]
    model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[method-assign]


def disown(model: nn.Module) -> None:
    """Undo `adopt`."""
    for name in _ADOPTED:
        model.__dict__.pop(name, None)


def _memory_footprint(model: "PreTrainedModel", return_buffers: bool = True) -> int:
    """Give the bytes of memory that weights take now: packed ones as packed, those on disk while resident."""
    held = sum(held_nbytes(p) for p in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers()) if return_buffers else 0
    return held + buffers + resident_nbytes(model)


def _save_pretrained(model: "PreTrainedModel", save_directory: Any, **options: Any) -> None:  # noqa: ANN401
    """Save the model as transformers does, and say in its card what loading it takes."""
    folder = Path(save_directory)
    _refuse_own_source(model, folder)
    packed = any(state_class(p) is not None for p in model.parameters())
    if packed:
        # Names as older checkpoints have them come with rules that split and merge values: not for packed parts.
        options["save_original_format"] = False
    with ONE_AT_A_TIME, warnings.catch_warnings(), nullcontext() if packed else _plain_config(model):
        # Said because some weights are on disk; they are read in turn, and need not fit in memory together.
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        type(model).save_pretrained(model, save_directory, **options)
    if packed and options.get("is_main_process", True) and folder.is_dir():
        write_note(folder / _CARD)


def _refuse_own_source(model: "PreTrainedModel", folder: Path) -> None:
    """Keep a checkpoint from being overwritten while weights are read, or mapped, from it; also through links."""
    files: Iterable[Path] = getattr(getattr(model, "hf_quantizer", None), "source_files", ())
    if not folder.is_dir():
        return
    there = {_identity(file) for file in folder.iterdir() if file.exists()}
    for file in files:
        if file.exists() and (file.parent.samefile(folder) or _identity(file) in there):
            raise OutputExistsError(
                f"{folder} holds {file.name}, which this model's weights are read from; save it in another folder"
            )


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


@contextmanager
def _plain_config(model: "PreTrainedModel") -> Iterator[None]:
    """Leave the quantization out of what is saved: nothing in it would be packed, and anyone can load it."""
    config = model.config
    kept = config.__dict__.pop("quantization_config", None)
    try:
        yield
    finally:
        if kept is not None:
            config.quantization_config = kept


def write_note(card: Path) -> None:
    """Say in `card`, a model card that need not be there yet, what loading the folder takes."""
    text = card.read_text(encoding="utf-8") if card.exists() else _FRONT_MATTER
    if "import t2n_hf" not in text:
        card.write_text(f"{text.rstrip()}\n\n{NOTE}" if card.exists() else text + NOTE, encoding="utf-8")
