"""Quantization schemes: how float values and small unsigned integers stand for each other."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from t2n_hf.errors import ConfigError, FormatError, QuantizationError, UnsupportedOpError
from t2n_hf.tensor.quant.described import Described

__all__ = ["QScalePerGroupF16", "QScheme"]


class QScheme(Described, abc.ABC):
    """Maps a float tensor to u8 values of the same shape, and back.

    A scheme that sets `STATE_NAME` and defines `state_meta` and `from_state` can be saved and offloaded with tensors
    that use it, see `Described`.
    """

    KIND: ClassVar[str] = "scheme"

    def quantize_as_torch(self, fp_tensor: torch.Tensor) -> torch.Tensor:
        """Give a quantized tensor of torch's own. Raises UnsupportedOpError unless the scheme is one that torch has."""
        raise UnsupportedOpError(
            f"torch has no quantized tensors under {type(self).__name__}; use quantize_as_u8, or a QTensor"
        )

    @abc.abstractmethod
    def quantize_as_u8(self, fp_tensor: torch.Tensor) -> torch.Tensor:
        """Give the u8 values of `fp_tensor`: uint8, same shape. Does not modify it."""

    @abc.abstractmethod
    def dequantize(self, u8_tensor: torch.Tensor, target_dtype: torch.dtype) -> torch.Tensor:
        """Give the values that `u8_tensor` stands for, in `target_dtype`, same shape."""


class QScalePerGroupF16(QScheme):
    """One f16 scale for each group of `group_size` values that follow each other; the middle of the range stands for 0.

    value = (u8 - 2^(n_bits-1)) * scale. Scales may be negative, as tract's are: then the end of the range that has one
    step more lies on the positive side.
    """

    STATE_NAME: ClassVar[str] = "scale_per_group_f16"

    def __init__(self, group_size: int, scale: torch.Tensor, n_bits: int) -> None:
        if not 1 <= n_bits <= 8:
            raise ConfigError(f"n_bits={n_bits}; expected 1 to 8")
        if group_size < 1:
            raise ConfigError(f"group_size={group_size}; expected at least 1")
        self.group_size = group_size
        self.scale = scale.to(torch.float16).reshape(-1, 1)
        if not scale.is_meta and not torch.isfinite(self.scale).all():
            raise QuantizationError(
                "a scale is NaN, infinite or beyond 65504, the largest of f16: the values are, or they are too large; "
                "rescale them, or leave them unquantized"
            )
        self.n_bits = n_bits

    @classmethod
    def fitted(cls, fp_tensor: torch.Tensor, group_size: int = 32, n_bits: int = 4) -> "QScalePerGroupF16":
        """Choose scales for `fp_tensor`: the value of largest magnitude of each group falls on the longer end."""
        groups = cls.reshape_tensor_per_group(fp_tensor.to(torch.float32), group_size)
        largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        return cls(group_size, largest / -(2 ** (n_bits - 1)), n_bits)

    @staticmethod
    def reshape_tensor_per_group(fp_tensor: torch.Tensor, group_size: int) -> torch.Tensor:
        """Give `fp_tensor` as (groups, group_size). Raises QuantizationError when it does not divide."""
        if fp_tensor.numel() % group_size:
            raise QuantizationError(
                f"a tensor of shape {tuple(fp_tensor.shape)} does not divide into groups of {group_size} values"
            )
        return fp_tensor.reshape(-1, group_size)

    def quantize_as_u8(self, fp_tensor: torch.Tensor) -> torch.Tensor:
        """Give the nearest u8 values under the stored scales: uint8, same shape. Arithmetic is f32."""
        groups = self.reshape_tensor_per_group(fp_tensor.to(torch.float32), self.group_size)
        if groups.shape[0] != self.scale.shape[0]:
            raise QuantizationError(
                f"{groups.shape[0]} groups of {self.group_size} values, but the scheme has {self.scale.shape[0]} scales"
            )
        scale = self.scale.to(device=groups.device, dtype=torch.float32)
        inverse = torch.where(scale == 0, scale, 1.0 / scale)
        if not groups.is_meta and not torch.isfinite(groups).all():
            raise QuantizationError(
                f"{int((~torch.isfinite(groups)).sum())} of {groups.numel()} values are NaN or infinite and cannot be "
                "quantized"
            )
        shifted = (groups * inverse).add_((2**self.n_bits + 1) / 2)
        return shifted.clamp_(0, 2**self.n_bits - 1).to(torch.uint8).reshape(fp_tensor.shape)

    def dequantize(self, u8_tensor: torch.Tensor, target_dtype: torch.dtype) -> torch.Tensor:
        """Give (u8 - offset) * scale, computed in `target_dtype`."""
        groups = self.reshape_tensor_per_group(u8_tensor, self.group_size)
        centred = (groups - 2 ** (self.n_bits - 1)).view(torch.int8)
        values = centred.to(self.scale.device, target_dtype) * self.scale.to(target_dtype)
        return values.reshape(u8_tensor.shape)

    def clone_with_scale_factor(self, scale_factor: float) -> "QScalePerGroupF16":
        """Give the same scheme with every scale divided by `scale_factor`."""
        return QScalePerGroupF16(self.group_size, self.scale / scale_factor, self.n_bits)

    def state_meta(self) -> dict[str, Any]:
        """Give the numbers beside the scales."""
        return {"group_size": self.group_size, "n_bits": self.n_bits}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Rebuild the scheme. Raises FormatError when numbers or scales are missing."""
        try:
            return cls(int(meta["group_size"]), tensors["scale"], int(meta["n_bits"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a QScalePerGroupF16 is stored as group_size, n_bits and scale: {error!r}") from error

    def __repr__(self) -> str:
        return f"QScalePerGroupF16(group_size={self.group_size}, n_bits={self.n_bits}, {self.scale.numel()} scales)"
