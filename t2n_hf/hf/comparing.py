"""A quantized checkpoint, or an export, beside what it was made from: errors of whole weights, read in pieces."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t2n_hf.errors import FormatError
from t2n_hf.hf.config import QUANT_METHOD, T2NConfig
from t2n_hf.hf.loading import empty_model, load_checkpoint
from t2n_hf.hf.one_at_a_time import ONE_AT_A_TIME
from t2n_hf.hf.plan import make_plan
from t2n_hf.hf.saving import state_class
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor, opaque_to_final_tensor
from t2n_hf.tensor.quant.packed_rows import PackedRows, row_chunks
from t2n_hf.tensor.transposed import TransposedTensor

__all__ = ["checkpoint_errors", "dense_reasons_of", "original_weights", "relative_error", "stored_error"]


def dense_reasons_of(folder: str | Path, quantization: Mapping[str, Any]) -> dict[str, str]:
    """Map the matrices of a quantized checkpoint that stayed float to the reason; nothing is read but config.json.

    `quantization` is its `quantization_config`. Raises ConfigError when this version of transformers has no such model.
    """
    if quantization.get("quant_method") != QUANT_METHOD:
        return {}
    model, _ = empty_model(folder, None, None, {"trust_remote_code": False})
    config: Any = T2NConfig.from_dict(quantization)
    with ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options: said when it was quantized
        plan = make_plan(model, config)
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    return {name: choice.reason for name, choice in plan.items() if choice.format is None and name in matrices}


def original_weights(path_or_id: str | Path) -> nn.Module:
    """Open the checkpoint of plain weights that something was made from; they stay on disk."""
    return load_checkpoint(path_or_id)


def checkpoint_errors(folder: str | Path, original: nn.Module) -> Iterator[tuple[str, float]]:
    """Give (name, relative error) of each packed weight of a checkpoint, reading a few rows at a time.

    Raises FormatError when a weight of `original` has another shape, or is missing.
    """
    for name, parameter in load_checkpoint(folder).named_parameters():
        if state_class(parameter) is not None:
            packed = parameter.reload() if isinstance(parameter, OffloadedTensor) else parameter.detach()
            yield name, relative_error(_same(original, name, tuple(packed.shape)), packed)


def _same(original: nn.Module, name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    found = dict(original.named_parameters(remove_duplicate=False)).get(name)
    if found is None or (shape is not None and tuple(found.shape) != shape):
        what = "has no such weight" if found is None else f"has it with shape {tuple(found.shape)}"
        raise FormatError(f"{name}: what this is compared with {what}; give the checkpoint that it was made from")
    return found.detach()


def stored_error(name: str, values: torch.Tensor, original: nn.Module) -> float:
    """Give the relative error of `values`, decoded from a `.dat` file, whatever way round a block format holds them.

    Raises FormatError when `original` has no weight of that name with as many values.
    """
    true = opaque_to_final_tensor(_same(original, name, None)).float()
    if true.numel() != values.numel():
        _same(original, name, tuple(values.shape))
    ways = [true] if true.dim() < 2 else [true, true.transpose(-1, -2)]
    fitting = [way for way in ways if way.shape == values.shape or way.flatten(1).shape == values.shape]
    # A square matrix fits both ways; the wrong way its error is far beyond that of any format.
    return min(relative_error(way.reshape(values.shape), values) for way in fitting or [true])


def relative_error(true: torch.Tensor, packed: torch.Tensor) -> float:
    """Compute ||packed - true|| / ||true|| in f32, some rows at a time; `true` may be on disk. 0 of zeros."""
    difference = total = 0.0
    for wanted, found in _pieces(true, packed):
        exact = wanted.float()
        total += float(torch.linalg.vector_norm(exact)) ** 2
        difference += float(torch.linalg.vector_norm(found.float() - exact)) ** 2
    return (difference / total) ** 0.5 if total else 0.0


def _pieces(true: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(packed, TransposedTensor) and packed.dim() == 2:
        true, packed = opaque_to_final_tensor(true).t(), packed.inner
    if isinstance(packed, OpaqueTensor):
        packed = packed.to(torch.float32)
        if not isinstance(packed, PackedRows | TransposedTensor):
            packed = opaque_to_final_tensor(packed)
    if packed.dim() > 2:
        for item in range(len(packed)):
            yield from _pieces(true[item], packed[item])
    elif packed.dim() == 2:
        for start, stop in row_chunks(*packed.shape):
            yield opaque_to_final_tensor(true[start:stop]), opaque_to_final_tensor(packed[start:stop])
    else:
        yield opaque_to_final_tensor(true), packed
