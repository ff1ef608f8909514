"""The int4 kernel's layout: found by a probe, undone bit for bit, absent without harm."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from t2n_hf.errors import UnsupportedOpError
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant import kernels
from t2n_hf.tensor.quant.kernels import TorchInt4Kernel, int4_kernel, int4_kernel_report
from t2n_hf.tensor.quant.q4_0_blocks import blocks_from_quants, quantize_rows, quants_of, scales_of

KERNEL = int4_kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason=f"no int4 kernel: {int4_kernel_report()}")


def blocks(rows=130, groups=3, seed=0):
    floats = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed))
    return quantize_rows(floats)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_every_layout_gives_its_blocks_back(width):
    kernel, canonical = TorchInt4Kernel(width), blocks()
    layout = kernel.pack(canonical)
    assert layout.packed.shape == (192, 48)
    assert layout.scales.shape == (3, 192, 2)
    quants, scales = kernel.unpack(layout, 64, 130)
    assert torch.equal(blocks_from_quants(quants.flatten(-2), scales), canonical[64:])
    rows = torch.tensor([129, 0, 64, 64, 31, 33])
    quants, scales = kernel.gather(layout, rows)
    assert torch.equal(blocks_from_quants(quants.flatten(-2), scales), canonical[rows])


def test_every_scale_survives_the_rounding_to_bf16():
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    scales = every[torch.isfinite(every)].view(-1, 4)
    canonical = blocks_from_quants(torch.full((scales.shape[0], 128), 7, dtype=torch.uint8), scales)
    kernel = TorchInt4Kernel(64)
    _, found = kernel.unpack(kernel.pack(canonical), 0, scales.shape[0])
    assert torch.equal(found.view(torch.int16), scales.view(torch.int16))


@needs_kernel
def test_the_kernels_own_packing_is_the_same():
    canonical = blocks(rows=192)
    theirs = torch._convert_weight_to_int4pack_for_cpu(quants_of(canonical).flatten(-2).int(), 1)
    assert torch.equal(KERNEL.pack(canonical).packed.view(-1), theirs.view(-1))


@needs_kernel
def test_what_is_kept_beside_the_scale_does_not_show_in_products():
    canonical = blocks(rows=64, groups=8)
    layout = KERNEL.pack(canonical)
    bare = layout.scales.clone()
    assert bool((bare[..., 1] != 0).any())
    bare[..., 1] = 0
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(KERNEL.matmul(x, layout), KERNEL.matmul(x, layout._replace(scales=bare)))


@needs_kernel
def test_a_wrong_layout_is_noticed():
    other = TorchInt4Kernel(16 if KERNEL.width != 16 else 64)
    assert "layout on this machine" in kernels._probe(other)
    assert kernels._probe(KERNEL) is None


def test_without_a_kernel_fast_computes_exactly_and_says_why(monkeypatch):
    monkeypatch.setattr(kernels, "_probed", lambda: (None, "the layout is another"))
    weight = QTensorTractScaleOnly.quantize(torch.randn(64, 64)).with_compute("fast")
    x = torch.randn(2, 64)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.to_base_tensor()))
    assert not weight.pack_for_kernel()
    assert set(weight._parts()) == {"q4_0"}
    assert int4_kernel_report() == "the layout is another"
    with pytest.raises(UnsupportedOpError, match="no kernel: the layout is another"):
        kernels.required_kernel()


@needs_kernel
def test_the_first_use_may_be_inside_fake_tensor_mode():
    program = (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from t2n_hf.tensor.quant.kernels import int4_kernel, int4_kernel_report\n"
        "with FakeTensorMode():\n"
        "    assert int4_kernel() is not None, int4_kernel_report()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scales_and_quants_are_read_from_canonical_blocks():
    quants = torch.arange(64, dtype=torch.uint8).view(1, 64) % 16
    scales = torch.tensor([[0.5, -2.0]], dtype=torch.float16)
    packed = blocks_from_quants(quants, scales)
    assert packed[0, 0, :3].tolist() == [0x00, 0x38, 0x00]  # 0.5 in f16, little endian; q[0] | q[16] << 4
    assert packed[0, 0, 3].item() == 0x11
    assert torch.equal(quants_of(packed).flatten(-2), quants)
    assert torch.equal(scales_of(packed), scales)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_may_lie_in_memory_in_any_way(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = QTensorTractScaleOnly.quantize(torch.randn(17, 64, generator=generator), dtype=dtype).with_compute("fast")
    wide = torch.randn(6, 128, generator=generator).to(dtype)
    for x in (wide[:, ::2], wide[:, :64].T.contiguous().T, wide[:1, :64].expand(5, 64)):
        assert torch.equal(F.linear(x, weight), F.linear(x.contiguous(), weight))
        assert torch.equal(F.linear(x[0], weight), F.linear(x[0].contiguous(), weight))
