"""Scales of large tables are held in half of the bytes: the same numbers, rows and blocks as in pairs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant import kernel_scales, kernels
from t2n_hf.tensor.quant.kernel_scales import kernel_pairs, scales_form
from t2n_hf.tensor.quant.kernels import TorchInt4Kernel, int4_kernel
from t2n_hf.tensor.quant.native import native_dense
from t2n_hf.tensor.quant.q4_0_blocks import blocks_from_quants

KERNEL = int4_kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no int4 kernel on this machine")
WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])
ROWS, COLUMNS = 32801, 256  # three slices, rows that do not divide by 64


@pytest.fixture(scope="module")
def canonical():
    """Blocks of a table with every finite scale of f16, in both signs, and quants of every kind."""
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    every = every[torch.isfinite(every)]
    scales = every[torch.randperm(len(every), generator=generator)].repeat(5)[: ROWS * COLUMNS // 32]
    return blocks_from_quants(quants, scales.view(ROWS, -1))


@pytest.fixture(scope="module")
def ordinary():
    """A table of ordinary values."""
    return QTensorTractScaleOnly.quantize(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)))


def values_of(blocks):
    """Decode blocks in numpy, as ggml describes them."""
    bytes_ = blocks.numpy()
    scales = bytes_[..., :2].copy().view(np.float16).astype(np.float32)
    quants = np.concatenate((bytes_[..., 2:] & 15, bytes_[..., 2:] >> 4), axis=-1)
    return ((quants.astype(np.float32) - 8) * scales).reshape(len(bytes_), -1)


def as_pairs(monkeypatch, pack):
    with monkeypatch.context() as patch:
        patch.setattr(kernel_scales, "_TABLE_SCALES", 1 << 62)
        return pack()


def held_bytes(shapes):
    assert KERNEL is not None
    packed = sum(rows * columns // 32 * 18 for rows, columns in shapes)
    return sum(KERNEL.nbytes(shape) for shape in shapes) / packed


@pytest.mark.parametrize("shape", [(49152, 576), (32000, 2048), (128256, 4096), (151936, 896), (262144, 640)])
def test_tables_of_vocabularies_hold_two_bytes_for_a_scale(shape):
    (slices, groups, rows), dtype = scales_form(*shape)
    assert dtype == torch.float16
    assert groups == shape[1] // 32
    assert shape[0] <= slices * rows < shape[0] * 1.03
    assert rows % 64 == 0
    assert (rows - 64) * groups < 1 << 17


@pytest.mark.parametrize("shape", [(5632, 2048), (28672, 4096), (36864, 4608), (2048, 5632), (8192, 512), (1, 32)])
def test_matrices_of_layers_and_small_tables_hold_pairs(shape):
    rows = -(-shape[0] // 64) * 64
    assert scales_form(*shape) == ((shape[1] // 32, rows, 2), torch.bfloat16)


@needs_kernel
def test_models_hold_at_most_a_tenth_more_than_their_blocks():
    layer = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    assert held_bytes([(49152, 576), *layer * 30]) < 1.09
    layer = [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)]
    tables = [(32000, 2048)] * 2
    assert held_bytes([*tables, *layer * 22]) < 1.1


@WIDTHS
def test_blocks_of_a_table_come_back_bit_for_bit(width, canonical):
    kernel = TorchInt4Kernel(width)
    layout = kernel.pack(canonical)
    assert layout.scales.dtype == torch.float16
    assert layout.packed.nbytes + layout.scales.nbytes == kernel.nbytes((ROWS, COLUMNS))
    length = layout.scales.shape[-1]
    for start, stop in ((0, ROWS), (64, 65), (length - 64, length + 70), (2 * length, ROWS)):
        quants, scales = kernel.unpack(layout, start, stop)
        assert torch.equal(blocks_from_quants(quants.flatten(-2), scales), canonical[start:stop])
    rows = torch.tensor([ROWS - 1, 0, length, length - 1, length, 33])
    quants, scales = kernel.gather(layout, rows)
    assert torch.equal(blocks_from_quants(quants.flatten(-2), scales), canonical[rows])


@WIDTHS
def test_rows_of_a_table_are_made_dense_exactly(width, canonical, tmp_path, monkeypatch):
    kernel = TorchInt4Kernel(width)
    layout = kernel.pack(canonical)
    length = layout.scales.shape[-1]
    reader, _ = native_dense(tmp_path)
    monkeypatch.setattr(kernels, "_native_probed", lambda: (reader, "here"))
    for start, stop in ((0, 100), (length - 128, length + 70), (ROWS // 64 * 64, ROWS)):
        expected = torch.from_numpy(values_of(canonical[start:stop]))
        for dtype in (torch.float32, torch.bfloat16):
            for native in (False, True):
                found = kernel.dense(layout, start, stop, dtype, native=native).contiguous()
                assert torch.equal(found.view(torch.int16), expected.to(dtype).view(torch.int16))


def test_pairs_are_those_that_would_be_held_without_what_rounding_took_away(canonical, monkeypatch):
    kernel = TorchInt4Kernel(64)
    table, pairs = kernel.pack(canonical), as_pairs(monkeypatch, lambda: kernel.pack(canonical))
    assert pairs.scales.dtype == torch.bfloat16
    padded, end = table.packed.shape[0], 0
    for start, stop, made in kernel_pairs(table.scales, padded):
        assert start == end
        end = stop
        assert torch.equal(made[..., 0].view(torch.int16), pairs.scales[:, start:stop, 0].view(torch.int16))
        assert not bool(made[..., 1].view(torch.int16).any())
    assert end == padded == pairs.packed.shape[0]


@needs_kernel
@pytest.mark.parametrize("count", [1, 3, 17])
def test_products_are_the_numbers_that_pairs_give(count, ordinary, monkeypatch):
    x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    table, pairs = KERNEL.pack(ordinary.q4_0), as_pairs(monkeypatch, lambda: KERNEL.pack(ordinary.q4_0))
    result = KERNEL.matmul(x, table)
    assert torch.equal(result, KERNEL.matmul(x, pairs))
    expected = x.float().numpy() @ values_of(ordinary.q4_0).T
    assert np.allclose(result[:, :ROWS].float().numpy(), expected, rtol=0.02, atol=0.2)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tied_table_serves_products_and_rows(dtype, ordinary):
    weight = ordinary.to(dtype).with_compute("fast")
    ids = torch.tensor([[0, ROWS - 1, 16000], [5, 5, 64]])
    x = torch.randn(2, 1, COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)
    dense = torch.from_numpy(values_of(ordinary.q4_0)).to(dtype)
    assert torch.allclose(F.linear(x, weight), F.linear(x, dense), rtol=0.02, atol=0.2)
    assert weight.scales.dtype == torch.float16
    assert torch.equal(F.embedding(ids, weight), dense[ids])
    assert torch.equal(weight[100:40000:999], dense[100:40000:999])
    assert torch.equal(weight.to_base_tensor(), dense)
    assert weight.opaque_nbytes == QTensorTractScaleOnly.resident_nbytes((ROWS, COLUMNS), "fast")
    assert weight.opaque_nbytes < 1.005 * QTensorTractScaleOnly.packed_nbytes((ROWS, COLUMNS))


@needs_kernel
def test_a_table_survives_states_of_both_kinds(ordinary):
    weight = ordinary.with_compute("fast")
    assert weight.pack_for_kernel()
    blocks, x = ordinary.q4_0, torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(4))
    for state in (weight.to_offload_state(), weight.to_private_state()):
        again = QTensorTractScaleOnly.from_offload_state(state).with_compute("fast")
        assert torch.equal(again.q4_0, blocks)
        assert torch.equal(F.linear(x, again), F.linear(x, weight))


@needs_kernel
def test_a_stack_of_tables_is_one_table_for_each_item(ordinary):
    blocks = torch.stack((ordinary.q4_0, ordinary.q4_0.flip(0)))
    stack = QTensorTractScaleOnly.from_offload_state({"tag": "t2n_hf.q4_0.v1", "tensors": {"q4_0": blocks}, "meta": {}})
    stack = stack.with_compute("fast")
    assert stack.pack_for_kernel()
    assert stack.scales.dtype == torch.float16
    assert stack.opaque_nbytes == QTensorTractScaleOnly.resident_nbytes((2, ROWS, COLUMNS), "fast")
    assert torch.equal(stack[1].q4_0, blocks[1])
    assert torch.equal(stack.q4_0, blocks)
    x = torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(5))
    assert torch.equal(F.linear(x, stack[1]), F.linear(x, ordinary.with_compute("fast")).flip(-1))
