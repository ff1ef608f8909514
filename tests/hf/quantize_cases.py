"""What the tests of quantize_checkpoint share: folders as bytes, changed checkpoints, a class that knows little."""

from pathlib import Path
from typing import Any

import models
import safetensors.torch
import torch

from t2n_hf import T2NConfig
from t2n_hf.contract import OffloadState, WeightFormat
from t2n_hf.errors import QuantizationError
from t2n_hf.tensor import OpaqueTensor


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def saved_packed(source: Any, checkpoint: Path, folder: Path, config: T2NConfig | None = None, **options: Any) -> Path:
    """The other way: load while quantizing, then save."""
    dtype = options.pop("dtype", "auto")
    model = type(source).from_pretrained(checkpoint, quantization_config=config or T2NConfig(), dtype=dtype)
    return models.saved(model, folder, **options)


def rewritten(checkpoint: Path, change: Any) -> Path:
    """Change the tensors of a checkpoint in one file: `change` gets them by name and may return others."""
    file = checkpoint / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    changed = change(tensors)
    safetensors.torch.save_file(tensors if changed is None else changed, file, metadata={"format": "pt"})
    return checkpoint


class Halves(OpaqueTensor, WeightFormat):
    """Values in f16 and their largest magnitude. Knows neither meta tensors nor rows, and notes what it was given."""

    OFFLOAD_STATE_TAG = "t2n_hf_tests.noted_halves.v1"
    given: dict[str, torch.Tensor | None] = {}  # noqa: RUF012 - looked at by a test
    half: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, half, largest, dtype, name=""):
        result = cls._shell(half.shape, dtype, half.device, name)
        result.half, result.largest = half, largest
        return result

    @classmethod
    def refuses(cls, shape, dtype):
        return None if len(shape) > 1 else "too few axes"

    @classmethod
    def packed_nbytes(cls, shape):
        return 2 * torch.Size(shape).numel() + 4

    @classmethod
    def quantize(cls, tensor, *, dtype=None, name="", importance=None):
        cls.given[name] = importance
        if not bool(torch.isfinite(tensor).all()):
            raise QuantizationError(f"{name} has NaN")
        return cls.of(tensor.half(), tensor.abs().max().float(), dtype or tensor.dtype, name)

    def to_offload_state(self):
        meta = {"dtype": str(self.dtype).removeprefix("torch.")}
        parts = {"largest": self.largest, "half": self.half}
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors=parts, meta=meta)

    @classmethod
    def from_offload_state(cls, state, target_device=None):
        tensors = state["tensors"]
        return cls.of(tensors["half"], tensors["largest"], getattr(torch, state["meta"]["dtype"]))

    def _to_base_tensor(self):
        return self.half.to(self.dtype)

    def _parts(self):
        return {"half": self.half, "largest": self.largest}

    def _rebuild(self, parts, dtype):
        return self.of(parts["half"], parts["largest"], dtype, self.name)
