"""Q8_1: 8-bit values with an f16 scale for 32 neighbours, for embeddings that tract gathers from. 9 bits per value.

tract 0.23.9 reads Q8_1 from a `.dat` file and gathers rows of it, exactly. It has no product with it: a graph with one
loads and fails when it is made runnable. So an export keeps a table in Q8_1 that is only looked up (token embeddings
that are not tied to the head); any other weight of this class is written dense, and listed as such with that reason.
In PyTorch all of it works, exactly.
"""

from typing import ClassVar, final

import torch

from t2n_hf.contract import InferenceTarget, OffloadState
from t2n_hf.errors import ConfigError
from t2n_hf.nnef.dat import Payload, q8_1_payload
from t2n_hf.tensor.quant.compressors import U8Compressor
from t2n_hf.tensor.quant.packed_blocks import PackedBlocks, byte_chunks
from t2n_hf.tensor.quant.packed_rows import demand_blocks
from t2n_hf.tensor.quant.qtensor import QTensorTract
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16, QScheme

__all__ = ["QTensorTractQ81"]

_F16_MAX = torch.finfo(torch.float16).max


def _blocks_from_quants(quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack `quants`, int8 (..., 32), and `scales`, f16 (..., 1), into blocks, uint8 (..., 36)."""
    # ggml multiplies products by it; tract does not read it. It is clamped: infinity would be no number to multiply by.
    sums = (scales.float() * quants.sum(dim=-1, keepdim=True, dtype=torch.int32)).clamp_(-_F16_MAX, _F16_MAX)
    parts = (scales, sums.to(torch.float16), quants)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


@final
class QTensorTractQ81(PackedBlocks, QTensorTract):
    """A weight (..., N, K), K % 32 == 0, in Q8_1.

    A block has 36 bytes: scale d, f16; d times the sum of the quants, f16; 32 quants, i8. value = quant * d. The value
    of largest magnitude of a block sets the scale, d = |max| / 127; there is nothing to choose by importance.
    """

    OFFLOAD_STATE_TAG = "t2n_hf.q8_1.v1"
    EXPORT_FORMAT: ClassVar[str] = "q8_1"
    PART: ClassVar[str] = "q8_1"
    LABEL: ClassVar[str] = "Q8_1"
    BLOCK_VALUES: ClassVar[int] = 32
    BLOCK_NBYTES: ClassVar[int] = 36

    def _fill(self, fp_tensor: torch.Tensor, qscheme: QScheme, u8_compressors: list[U8Compressor]) -> None:
        if not isinstance(qscheme, QScalePerGroupF16) or (qscheme.n_bits, qscheme.group_size) != (8, 32):
            raise ConfigError(f"Q8_1 needs QScalePerGroupF16(group_size=32, n_bits=8), got {qscheme!r}")
        demand_blocks(self.LABEL, self.BLOCK_VALUES, fp_tensor)
        quants = (qscheme.quantize_as_u8(fp_tensor.detach()) ^ 128).view(torch.int8).unflatten(-1, (-1, 32))
        scales = qscheme.scale.to(fp_tensor.device).reshape(*quants.shape[:-1], 1)
        self._hold(_blocks_from_quants(quants, scales))

    @classmethod
    def _blocks_of(cls, values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        scales = (values.abs().amax(dim=-1, keepdim=True) / 127).to(torch.float16)
        stored = scales.float()
        inverse = torch.where(stored == 0, stored, 1.0 / stored)
        # A scale so small that f16 rounds it much can leave values beyond the range.
        return _blocks_from_quants((values * inverse).round_().clamp_(-127, 127).to(torch.int8), scales)

    @classmethod
    def _values_of(cls, blocks: torch.Tensor) -> torch.Tensor:
        scales = blocks[..., :2].contiguous().view(torch.float16).float()
        return blocks[..., 4:].contiguous().view(torch.int8).float().mul_(scales)

    @classmethod
    def dat_payload(cls, state: OffloadState, target: InferenceTarget) -> Payload:
        """Say what the `.dat` holds: the blocks as they are."""
        weight = cls.from_offload_state(state)
        return q8_1_payload(tuple(weight.shape), lambda: byte_chunks(weight._blocks))

    # ---- the interface of QTensor ---------------------------------------------------------------------------------

    @property
    def q8_1(self) -> torch.Tensor:
        """The blocks, uint8 (..., N, K/32, 36)."""
        return self._blocks

    @property
    def qscheme(self) -> QScheme:  # type: ignore[override]
        """The scales as a scheme."""
        return QScalePerGroupF16(32, self._blocks[..., :2].contiguous().view(torch.float16), 8)

    def decompress_to_u8(self) -> torch.Tensor:
        """Give the quants as u8: uint8 of this shape, 128 stands for 0."""
        return (self._blocks[..., 4:] ^ 128).flatten(-2)

    def decompress(self) -> torch.Tensor:
        """Give the float values, in the dtype that the tensor acts as."""
        return self.to_base_tensor()
