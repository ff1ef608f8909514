"""Q4_0 blocks one by one against numpy: the rule for scales and quants, its ties and its ends, and the way back."""

import numpy as np
import pytest
import torch
from q4_0_rule import numpy_blocks

from t2n_hf.tensor.quant.kernels import TorchInt4Kernel
from t2n_hf.tensor.quant.q4_0_blocks import (
    blocks_from_quants,
    dequantize_blocks,
    quantize_rows,
    quants_of,
    scales_of,
)


def values(kind, dtype):
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(40, 96, generator=generator)
    if kind == "whole numbers":  # nearly every block holds its largest value with both signs
        floats = torch.randint(-8, 9, (40, 96), generator=generator).float()
    elif kind == "subnormal scales":
        floats = floats * torch.logspace(-9, -5, 40).unsqueeze(1)
    elif kind == "many rows":  # more than are quantized at once
        floats = torch.randn(300, 4096, generator=generator)
    return floats.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "whole numbers", "subnormal scales", "many rows"])
def test_blocks_are_those_of_the_rule_also_when_a_block_has_its_largest_value_with_both_signs(kind, dtype):
    rows = values(kind, dtype)
    before = rows.clone()
    blocks = quantize_rows(rows)
    scales, quants = numpy_blocks(rows)
    np.testing.assert_array_equal(scales_of(blocks).reshape(-1).view(torch.int16).numpy(), scales.view(np.int16))
    np.testing.assert_array_equal(quants_of(blocks).reshape(-1, 32).numpy(), quants)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_reading_blocks_computes_in_f32_rounds_once_and_leaves_them_alone(dtype):
    for rows in (1, 70):
        blocks = quantize_rows(values("normal", torch.float32)[:1].repeat(rows, 1)[:, : 32 if rows == 1 else 96])
        before = blocks.clone()
        quants, scales = quants_of(blocks).float(), scales_of(blocks).float()
        expected = ((quants - 8) * scales.unsqueeze(-1)).flatten(-2).to(dtype)
        assert torch.equal(dequantize_blocks(blocks, dtype), expected)
        assert torch.equal(blocks, before)
        for width in (16, 32, 64):
            kernel = TorchInt4Kernel(width)
            layout = kernel.pack(blocks)
            kept = [part.clone() for part in layout]
            assert torch.equal(kernel.dense(layout, 0, rows, dtype), expected)
            assert rows < 64 or torch.equal(kernel.dense(layout, 64, rows, dtype), expected[64:])
            assert all(map(torch.equal, layout, kept))


def test_zeros_keep_the_sign_that_their_scale_gives_them_in_every_layout():
    quants = torch.full((64, 32), 7, dtype=torch.uint8)
    blocks = blocks_from_quants(quants, torch.full((64, 1), -0.0, dtype=torch.float16))
    kernel = TorchInt4Kernel(64)
    for dense in (dequantize_blocks(blocks, torch.float32), kernel.dense(kernel.pack(blocks), 0, 64, torch.float32)):
        assert torch.equal(dense, torch.zeros(64, 32))
        assert not torch.signbit(dense).any()  # -1 * -0.0


def test_quants_may_lie_anywhere_in_memory():
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 16, (3 + 4 * 64,), generator=generator, dtype=torch.uint8)
    quants, scales = memory[3:].view(4, 64), torch.ones(2, 4, dtype=torch.float16).T
    assert torch.equal(quants_of(blocks_from_quants(quants, scales)).flatten(-2), quants)
