"""The weights of a model by name: which names are one tensor, and how many bytes each takes."""

from typing import Any

import torch
from torch import nn

from t2n_hf.tensor.contents import MemoryContent
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor

__all__ = ["held_nbytes", "replace_parameter", "tied_names", "weights_of"]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give every parameter and persistent buffer under all of its names, in the order of the model."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    persistent = buffers & set(model.state_dict(keep_vars=True))
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **{name: b for name, b in model.named_buffers(remove_duplicate=False) if name in persistent},
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map every name of `weights_of` to the one name that its tensor is known by.

    That is the name that transformers keeps when it saves (the embeddings of a tied head), else the first one.
    """
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    for name, tensor in weights_of(model).items():
        names.setdefault(id(tensor), []).append(name)
    canonical = {}
    for group in names.values():
        kept = next((name for name in group if name not in declared), group[0])
        canonical.update(dict.fromkeys(group, kept))
    return canonical


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `old` is: ties are kept."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[leaf] = new


def held_nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a parameter holds in memory: of its packed parts, or of its values. 0 when it lives on disk."""
    if isinstance(tensor, OffloadedTensor):
        content = tensor.source.content  # in memory when it waits there for an accelerator
        return content.nbytes if isinstance(content, MemoryContent) else 0
    if isinstance(tensor, OpaqueTensor):
        return tensor.opaque_nbytes
    nbytes: Any = tensor.nbytes
    return int(nbytes)
