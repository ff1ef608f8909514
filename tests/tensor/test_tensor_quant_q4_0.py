"""Q4_0 against the gguf package, numpy and dense torch, in both layouts."""

import copy
import json
import threading

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from t2n_hf.contract import InferenceTarget
from t2n_hf.errors import ConfigError, FormatError, QuantizationError
from t2n_hf.nnef.dat import read_dat
from t2n_hf.tensor import QScalePerGroupF16, QTensor, QTensorTractScaleOnly
from t2n_hf.tensor.compute import compute_mode
from t2n_hf.tensor.opaque import materialised_counts
from t2n_hf.tensor.quant.kernels import int4_kernel
from t2n_hf.tensor.quant.q4_0_blocks import quantize_rows, scales_of
from t2n_hf.tensor.transposed import TransposedTensor

Q4_0 = gguf.GGMLQuantizationType.Q4_0
needs_kernel = pytest.mark.skipif(int4_kernel() is None, reason="no int4 kernel on this machine")


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_exact_scales(*shape):
    """Random numbers whose largest value in each block is an f16 number times 8, so that no scale is rounded."""
    values = noise(*shape).clamp(-1.9, 1.9).unflatten(-1, (-1, 32))
    values[..., 3] = torch.where(values[..., 3] < 0, -2.0, 2.0)
    return values.flatten(-2)


def in_both_layouts(weight):
    """The weight with canonical blocks, and (where there is a kernel) in the kernel's layout."""
    twins = [weight]
    if int4_kernel() is not None:
        packed = copy.deepcopy(weight)
        assert packed.pack_for_kernel()
        twins.append(packed)
    return twins


def test_blocks_are_those_of_gguf_bit_for_bit():
    floats = with_exact_scales(50, 96)
    expected = gguf.quants.quantize(floats.numpy(), Q4_0)
    blocks = QTensorTractScaleOnly.quantize(floats).q4_0
    np.testing.assert_array_equal(blocks.flatten(1).numpy(), expected)


def test_scales_are_those_of_gguf_for_any_values_and_the_error_is_no_larger():
    floats = noise(500, 320)
    theirs = gguf.quants.quantize(floats.numpy(), Q4_0)
    weight = QTensorTractScaleOnly.quantize(floats)
    np.testing.assert_array_equal(
        weight.q4_0[..., :2].numpy(), torch.from_numpy(theirs).view(500, 10, 18)[..., :2].numpy()
    )
    ours = (weight.to_base_tensor() - floats).square().mean()
    assert ours <= np.square(gguf.quants.dequantize(theirs, Q4_0) - floats.numpy()).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_gguf_in_both_layouts(dtype):
    weight = QTensorTractScaleOnly.quantize(noise(200, 96, dtype=dtype))
    expected = torch.from_numpy(gguf.quants.dequantize(weight.q4_0.flatten(1).numpy(), Q4_0)).to(dtype)
    for twin in in_both_layouts(weight):
        assert torch.equal(twin.to_base_tensor(), expected)


def test_any_blocks_decode_like_gguf_in_both_layouts():
    blocks = torch.randint(0, 256, (130, 3, 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    blocks[..., :2] = finite[torch.linspace(0, finite.numel() - 1, 390).long()].view(torch.uint8).view(130, 3, 2)
    weight = QTensorTractScaleOnly.from_offload_state(
        {"tag": "t2n_hf.q4_0.v1", "tensors": {"q4_0": blocks}, "meta": {"dtype": "float32"}}
    )
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), Q4_0))
    for twin in in_both_layouts(weight):
        assert torch.equal(twin.to_base_tensor(), expected)
        assert torch.equal(twin.q4_0, blocks)


def test_a_zero_block_is_exact_and_a_tiny_one_is_finite():
    floats = noise(4, 64)
    floats[0, :32], floats[1, :32], floats[2, :32] = 0, 1e-8, 1e-8 * noise(32)
    values = QTensorTractScaleOnly.quantize(floats).to_base_tensor()
    assert torch.equal(values[0, :32], torch.zeros(32))
    assert bool(torch.isfinite(values).all())
    assert float((values[1:3, :32] - floats[1:3, :32]).abs().max()) < 6e-8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_not_finite_is_refused_by_name(bad):
    floats = noise(4, 64)
    floats[2, 33] = bad
    with pytest.raises(QuantizationError, match=r"lm_head\.weight has 1 values that are NaN or infinite"):
        QTensorTractScaleOnly.quantize(floats, name="lm_head.weight")


def test_a_value_that_no_scale_reaches_is_refused_and_the_largest_is_held():
    floats = torch.zeros(1, 32)
    floats[0, 0] = 8 * 65504
    assert torch.equal(QTensorTractScaleOnly.quantize(floats).to_base_tensor(), floats)
    with pytest.raises(QuantizationError, match=r"w has a value of magnitude 600000; Q4_0 holds at most 8 \* 65504"):
        QTensorTractScaleOnly.quantize(floats * 0 + 600000, name="w")


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 48), torch.float32, "last axis has 48 values"),
        ((64,), torch.float32, "1 axes"),
        ((0, 32), torch.float32, "last axis"),
        ((64, 32), torch.int64, "not a float"),
    ],
    ids=["48 columns", "vector", "empty", "integers"],
)
def test_what_the_format_cannot_hold_is_refused_with_a_reason(shape, dtype, reason):
    assert reason in QTensorTractScaleOnly.refuses(shape, dtype)
    with pytest.raises(QuantizationError, match=reason):
        QTensorTractScaleOnly.quantize(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(64, 32), (3, 5, 64), (1, 4096)], ids=str)
def test_sizes_are_exact(shape):
    weight = QTensorTractScaleOnly.quantize(noise(*shape))
    assert QTensorTractScaleOnly.packed_nbytes(shape) == weight.opaque_nbytes == torch.Size(shape).numel() * 9 // 16
    assert QTensorTractScaleOnly.quantize(torch.empty(shape, device="meta")).opaque_nbytes == weight.opaque_nbytes


@pytest.mark.parametrize("rows", [1, 40, 60, 5000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_products_equal_the_dense_ones(rows, dtype):
    """Also where the weight is read in several chunks (5000 x 320)."""
    weight = QTensorTractScaleOnly.quantize(noise(rows, 320, dtype=dtype), name="w")
    dense, bias = weight.to_base_tensor(), noise(rows, seed=3, dtype=dtype)
    before = materialised_counts()
    for twin in in_both_layouts(weight):
        for count in (1, 7, 100):
            x = noise(2, count, 320, seed=1, dtype=dtype)
            with compute_mode("exact"):
                for found, expected in [
                    (F.linear(x, twin, bias), F.linear(x, dense, bias)),
                    (x @ twin.T, x @ dense.T),
                ]:
                    # The order of the sums in f32 may differ: chunks have their own place in memory.
                    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
                    assert (found - expected).float().norm() <= tolerance * expected.float().norm()
    assert materialised_counts() == before


@needs_kernel
@pytest.mark.parametrize("rows", [1, 60, 64, 5000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fast_products_are_near_the_exact_ones_for_any_number_of_rows(rows, dtype):
    weight = QTensorTractScaleOnly.quantize(noise(rows, 320, dtype=dtype)).with_compute("fast")
    dense, bias = weight.to_base_tensor(), noise(rows, seed=3, dtype=dtype)
    for count in (1, 48, 49, 100):
        x = noise(2, count, 320, seed=1, dtype=dtype)
        found, expected = F.linear(x, weight, bias), F.linear(x, dense, bias)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert (found - expected).float().norm() <= 0.006 * expected.float().norm()


@needs_kernel
def test_a_weight_is_never_held_twice():
    weight = QTensorTractScaleOnly.quantize(noise(128, 320)).with_compute("fast")
    alias, half = weight.detach(), weight.to(torch.bfloat16)
    canonical = weight.q4_0.clone()
    F.linear(noise(1, 320), weight)
    for tensor in (weight, alias, half):
        assert set(tensor._parts()) == {"packed", "scales"}
        assert tensor.opaque_nbytes == 128 * 320 * 20 // 32
        assert tensor.packed.data_ptr() == weight.packed.data_ptr()
    assert torch.equal(alias.q4_0, canonical)
    assert torch.equal(weight.to_offload_state()["tensors"]["q4_0"], canonical)


def test_exact_weights_stay_canonical():
    weight = QTensorTractScaleOnly.quantize(noise(128, 320))
    F.linear(noise(1, 320), weight)
    F.embedding(torch.tensor([1]), weight)
    assert set(weight._parts()) == {"q4_0"}
    with pytest.raises(FormatError, match="holds canonical blocks"):
        _ = weight.packed


def test_one_table_serves_gather_and_product_in_both_layouts():
    weight = QTensorTractScaleOnly.quantize(noise(200, 96))
    dense = weight.to_base_tensor()
    ids = torch.randint(0, 200, (3, 17), generator=torch.Generator().manual_seed(0))
    for twin in in_both_layouts(weight):
        before = materialised_counts()
        for found, expected in [
            (F.embedding(ids, twin), dense[ids]),
            (F.embedding(ids[:, :0], twin), dense[ids[:, :0]]),
            (F.embedding(ids.int(), twin, 0), dense[ids]),
            (twin[ids - 200], dense[ids]),
            (twin[7], dense[7]),
            (twin[torch.tensor(-1)], dense[-1]),
            (twin[3:150], dense[3:150]),
            (twin[::7], dense[::7]),
            (twin[5:5], dense[5:5]),
            (twin[5:2], dense[5:2]),
        ]:
            assert torch.equal(found.clone(), expected)
        assert materialised_counts() == before
        for outside in (torch.tensor([200]), torch.tensor([-1])):
            with pytest.raises(IndexError, match="out of range"):
                F.embedding(outside, twin)
        with pytest.raises(IndexError):
            twin[200]


@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_experts_are_taken_by_index_without_values(compute):
    floats = noise(4, 80, 64)
    experts = QTensorTractScaleOnly.quantize(floats, name="experts.gate_up_proj").with_compute(compute)
    dense, x = experts.to_base_tensor(), noise(5, 64, seed=1)
    before = materialised_counts()
    for index in (0, torch.tensor(2), -1):
        one = experts[index]
        assert type(one) is QTensorTractScaleOnly
        expected = F.linear(x, dense[index])
        assert (F.linear(x, one) - expected).norm() <= 0.006 * expected.norm()
    assert experts[1].name == "experts.gate_up_proj[1]"
    assert materialised_counts() == before
    assert torch.equal(experts.q4_0, quantize_rows(floats))
    assert torch.equal(experts.to_base_tensor(), dense)
    assert torch.equal(copy.deepcopy(experts), experts)


def test_states_share_memory_and_move_between_devices():
    weight = QTensorTractScaleOnly.quantize(noise(64, 64), dtype=torch.bfloat16)
    state = weight.to_offload_state()
    assert state["meta"] == {"dtype": "bfloat16"}
    again = QTensorTractScaleOnly.from_offload_state(state)
    assert again.q4_0.data_ptr() == weight.q4_0.data_ptr()
    assert again.dtype == torch.bfloat16
    assert QTensorTractScaleOnly.from_offload_state(state, "meta").device.type == "meta"
    for twin in in_both_layouts(weight):
        assert twin.to("meta").q4_0.device.type == "meta"


@needs_kernel
def test_a_private_state_keeps_the_kernels_layout_and_no_other_process_takes_it():
    weight = QTensorTractScaleOnly.quantize(noise(70, 64)).with_compute("fast")
    weight.pack_for_kernel()
    state = weight.to_private_state()
    again = QTensorTractScaleOnly.from_offload_state(state)
    assert (again.compute, again.shape) == ("fast", weight.shape)
    assert again.packed.data_ptr() == weight.packed.data_ptr()
    assert torch.equal(again, weight)
    foreign = {**state, "meta": {**state["meta"], "kernel": "another machine's"}}
    with pytest.raises(FormatError, match="another machine's"):
        QTensorTractScaleOnly.from_offload_state(foreign)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"q4_0": torch.zeros(4, 1, 17, dtype=torch.uint8)},
        {"q4_0": torch.zeros(4, 1, 18)},
        {"q4_0": torch.zeros(18)},
    ],
    ids=["nothing", "17 bytes", "floats", "one axis"],
)
def test_a_state_that_is_no_q4_0_is_refused(tensors):
    with pytest.raises(FormatError, match="Q4_0 state holds one part 'q4_0'"):
        QTensorTractScaleOnly.from_offload_state({"tag": "t2n_hf.q4_0.v1", "tensors": tensors, "meta": {}})


def test_the_dat_file_holds_the_blocks_as_they_are(tmp_path):
    weight = QTensorTractScaleOnly.quantize(noise(64, 96))
    for twin in in_both_layouts(weight):
        twin.write_in_file(tmp_path, "w")
        assert (tmp_path / "w.dat").read_bytes()[128:] == weight.q4_0.numpy().tobytes()
        np.testing.assert_array_equal(read_dat(tmp_path / "w.dat"), weight.to_base_tensor().numpy())
        payload = QTensorTractScaleOnly.dat_payload(twin.to_offload_state(), InferenceTarget(dtype="f16"))
        assert payload.header.format == "q4_0"


def test_a_scheme_of_ones_own_is_kept():
    floats = noise(8, 64)
    scheme = QScalePerGroupF16(group_size=32, scale=torch.full((16,), 0.25), n_bits=4)
    weight = QTensorTractScaleOnly(floats, scheme, dequant_to_dtype=torch.bfloat16, specific_machine="arm64")
    assert isinstance(weight, QTensor)
    assert weight.dequant_to_dtype == weight.dtype == torch.bfloat16
    assert weight.qscheme.scale.unique().tolist() == [0.25]
    expected = ((floats * 4).add(8.5).floor().clamp(0, 15) - 8) / 4
    assert torch.equal(weight.to_base_tensor(), expected.to(torch.bfloat16))
    assert torch.equal(weight.decompress(), weight.to_base_tensor())
    assert torch.equal(weight.decompress_to_u8().float(), (expected * 4) + 8)
    fitted = QTensorTractScaleOnly(floats, QScalePerGroupF16.fitted(floats))
    assert torch.equal(fitted, QTensorTractScaleOnly.quantize(floats))


@pytest.mark.parametrize(("group_size", "n_bits"), [(64, 4), (32, 8)], ids=["groups of 64", "8 bits"])
def test_another_scheme_is_refused(group_size, n_bits):
    floats = noise(8, 64)
    with pytest.raises(ConfigError, match="group_size=32, n_bits=4"):
        QTensorTractScaleOnly(floats, QScalePerGroupF16.fitted(floats, group_size, n_bits))


def test_compute_is_one_of_the_words_there_are():
    weight = QTensorTractScaleOnly.quantize(noise(32, 32))
    assert weight.compute == "exact"
    assert weight.with_compute("fast").compute == "fast"
    with pytest.raises(ConfigError, match="'quick'"):
        weight.with_compute("quick")


@needs_kernel
def test_threads_pack_once_and_see_whole_weights():
    weight = nn.Parameter(QTensorTractScaleOnly.quantize(noise(512, 320)).with_compute("fast"), requires_grad=False)
    dense, x = weight.to_base_tensor(), noise(1, 320, seed=1)
    fast, layouts, rows = [], [], []
    start = threading.Barrier(6)

    def product():
        start.wait()
        fast.append(F.linear(x, weight))
        layouts.append(weight.packed.data_ptr())

    def gather():
        start.wait()
        rows.append(torch.equal(F.embedding(torch.tensor([3, 511]), weight), dense[[3, 511]]))

    threads = [threading.Thread(target=target) for target in [product, gather] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(layouts)) == 1
    assert len(fast) == 3
    assert all(torch.equal(fast[0], other) for other in fast)
    assert rows == [True] * 3


def test_gradients_are_those_of_the_dense_weight_in_chunks():
    weight = QTensorTractScaleOnly.quantize(noise(5000, 128))
    dense = weight.to_base_tensor()
    x, y = (noise(3, 128, seed=1).requires_grad_() for _ in range(2))
    F.linear(x, weight).square().sum().backward()
    F.linear(y, dense).square().sum().backward()
    assert (x.grad - y.grad).norm() <= 1e-6 * y.grad.norm()


def test_the_meta_of_a_state_is_json_and_the_scales_are_exposed():
    weight = QTensorTractScaleOnly.quantize(noise(32, 64))
    assert json.loads(json.dumps(weight.to_private_state()["meta"])) == {"dtype": "float32", "compute": "exact"}
    assert torch.equal(weight.qscheme.scale.view(32, 2), scales_of(weight.q4_0))


def test_transposing_needs_no_values():
    weight = QTensorTractScaleOnly.quantize(noise(32, 64))
    assert type(weight.T) is TransposedTensor
    assert type(weight.transpose(-1, 0)) is TransposedTensor
    assert weight.T.T is weight


def test_defaults_that_others_set_change_nothing():
    """from_pretrained builds models under another default device and dtype."""
    floats, x, ids = noise(100, 64), noise(2, 64, seed=1), torch.tensor([1, 99])
    expected = QTensorTractScaleOnly.quantize(floats).with_compute("fast")
    product, rows = F.linear(x, expected), F.embedding(ids, expected)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            weight = QTensorTractScaleOnly.quantize(floats).with_compute("fast")
            found, gathered = F.linear(x, weight), F.embedding(ids, weight)
            assert torch.equal(weight.q4_0, expected.q4_0)
            assert torch.equal(weight.to_base_tensor(), expected.to_base_tensor())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, product)
    assert torch.equal(gathered, rows)


def test_fake_tensors_compute_shapes_and_leave_the_real_weight_alone():
    weight = QTensorTractScaleOnly.quantize(noise(100, 64)).with_compute("fast")
    mode = FakeTensorMode()
    fake = mode.from_tensor(weight)
    with mode:
        assert F.linear(torch.empty(2, 64), fake).shape == (2, 100)
        assert F.embedding(torch.empty(2, 3, dtype=torch.int64), fake).shape == (2, 3, 64)
        assert (torch.empty(2, 64) @ fake.T).shape == (2, 100)
    assert type(fake) is QTensorTractScaleOnly
    assert set(weight._parts()) == {"q4_0"}
