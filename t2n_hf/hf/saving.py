"""Saving a packed model in safetensors, with a note for who opens the folder."""

import warnings
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.hf.hooks import resident_nbytes
from t2n_hf.hf.stored import StoredForm, StoredForms, key_of_part
from t2n_hf.hf.weights import held_nbytes, tied_names
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor, opaque_to_final_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NOTE", "adopt", "disown", "packed_state_dict", "state_of"]

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
_ADOPTED: Final = ("save_pretrained", "get_memory_footprint")


def state_of(tensor: torch.Tensor) -> OffloadState | None:
    """Give the offload state of a packed tensor, read from disk if it is there; None for a tensor of plain values."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.stored_state()
    return tensor.to_offload_state() if isinstance(tensor, SupportsOffloadState) else None


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
            tensors[name] = opaque_to_final_tensor(value)
            continue
        forms[name] = StoredForm(state["tag"], tuple(sorted(state["tensors"])), state["meta"])
        tensors.update({key_of_part(name, part): tensor for part, tensor in state["tensors"].items()})
    return tensors, StoredForms(forms)


def adopt(model: "PreTrainedModel") -> None:
    """Make two methods of this one model tell the truth about packed weights: what it takes, and how it is saved."""
    model.get_memory_footprint = MethodType(_memory_footprint, model)  # type: ignore[method-assign]
    model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[method-assign]


def disown(model: "PreTrainedModel") -> None:
    """Undo `adopt`."""
    for name in _ADOPTED:
        model.__dict__.pop(name, None)


def _memory_footprint(model: "PreTrainedModel", return_buffers: bool = True) -> int:
    """Give the bytes of memory that weights take now: packed ones as packed, those on disk while resident."""
    held = sum(held_nbytes(p) for p in model.parameters() if not isinstance(p, OffloadedTensor))
    buffers = sum(buffer.nbytes for buffer in model.buffers()) if return_buffers else 0
    return held + buffers + resident_nbytes(model)


def _save_pretrained(model: "PreTrainedModel", save_directory: Any, **options: Any) -> None:  # noqa: ANN401
    """Save the model as transformers does, and say in its card what loading it takes."""
    with warnings.catch_warnings():
        # Said because some weights are on disk; they are read in turn, and need not fit in memory together.
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        type(model).save_pretrained(model, save_directory, **options)
    if options.get("is_main_process", True) and Path(save_directory).is_dir():
        _write_note(Path(save_directory) / _CARD)


def _write_note(card: Path) -> None:
    text = card.read_text(encoding="utf-8") if card.exists() else _FRONT_MATTER
    if "import t2n_hf" not in text:
        card.write_text(f"{text.rstrip()}\n\n{NOTE}" if card.exists() else text + NOTE, encoding="utf-8")
