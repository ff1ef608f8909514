import copy
import os

import pytest
import torch
import torch.nn.functional as F
from offload_cases import Readings, checkpoint, stamp
from torch import nn

from t2n_hf.errors import ConfigError, FormatError, StorageError
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool
from t2n_hf.tensor.offload import OffloadedTensor


@pytest.fixture
def stored(tmp_path):
    return checkpoint(tmp_path)


def offloaded(stored, name, **options):
    return OffloadedTensor.from_byte_range(stored[2][name], name, **options)


def test_it_looks_like_the_tensor_and_reads_nothing(stored, monkeypatch):
    weight = offloaded(stored, "linear", dtype=torch.float16)
    readings = Readings(stored[2]["linear"], monkeypatch)
    assert (weight.shape, weight.dtype, weight.device.type, weight.ndim) == ((24, 64), torch.float16, "cpu", 2)
    assert weight.numel() == 24 * 64
    assert not weight.is_meta
    assert (weight.nbytes_loaded, weight.opaque_nbytes) == (24 * 64 * 2, 0)
    assert "linear" in repr(weight)
    assert readings.take() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_file_cast_to_the_dtype(stored, dtype):
    weight = offloaded(stored, "linear", dtype=dtype)
    assert torch.equal(weight.to_base_tensor(), stored[1]["linear"].to(dtype))
    assert torch.equal(weight + 1, stored[1]["linear"].to(dtype) + 1)


@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "direct"])
def test_products_are_those_of_the_plain_weight(stored, pooled):
    plain = stored[1]["linear"]
    weight = offloaded(stored, "linear")
    pool = TensorResidencyPool()
    weight.bind_pool(pool if pooled else None)
    x = torch.randn(3, 64)
    assert torch.equal(F.linear(x, weight, stored[1]["bias"]), F.linear(x, plain, stored[1]["bias"]))
    assert torch.equal(x @ weight.T, x @ plain.T)
    assert torch.equal(torch.matmul(x, weight.transpose(0, 1)), x @ plain.T)
    assert torch.equal(weight @ torch.ones(64), plain @ torch.ones(64))
    pool.close()


def test_a_gradient_reaches_the_input(stored):
    weight = offloaded(stored, "linear")
    x = torch.randn(3, 64, requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert torch.allclose(x.grad, stored[1]["linear"].sum(0).expand(3, 64))


def test_an_embedding_reads_only_the_rows_it_needs(stored, monkeypatch):
    table = offloaded(stored, "table")
    readings = Readings(stored[2]["table"], monkeypatch)
    indices = torch.tensor([[3, 4, 3], [49, 0, 4]])
    assert torch.equal(F.embedding(indices, table), stored[1]["table"][indices])
    assert readings.take() == 4 * 16 * 4
    assert torch.equal(F.embedding(torch.tensor([7]), table), stored[1]["table"][[7]])
    assert readings.take() == 16 * 4
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([50]), table)


def test_an_embedding_uses_a_resident_table(stored, monkeypatch):
    table = offloaded(stored, "table")
    with TensorResidencyPool() as pool:
        table.bind_pool(pool)
        F.embedding(torch.tensor([1]), table)
        assert not pool.is_resident(table)
        pool.resolve(table)
        readings = Readings(stored[2]["table"], monkeypatch)
        assert torch.equal(F.embedding(torch.tensor([1, 5]), table), stored[1]["table"][[1, 5]])
        assert readings.take() == 0


@pytest.mark.parametrize(
    ("index", "rows"),
    [(2, 1), (-1, 1), ((1, 3), 1), (slice(1, 3), 2), ((slice(0, 4, 2), 0), 2), (torch.tensor(3), 1), (slice(None), 4)],
    ids=str,
)
def test_an_item_of_a_three_dimensional_weight_reads_only_its_slice(stored, monkeypatch, index, rows):
    experts = offloaded(stored, "experts")
    readings = Readings(stored[2]["experts"], monkeypatch)
    assert torch.equal(experts[index], stored[1]["experts"][index])
    assert readings.take() == rows * 8 * 32 * 4


@pytest.mark.parametrize("index", [..., None, [0, 2], (slice(None), 1), torch.tensor([1, 1])], ids=str)
def test_any_other_index_works_too(stored, index):
    assert torch.equal(offloaded(stored, "experts")[index], stored[1]["experts"][index])
    with pytest.raises(IndexError):
        offloaded(stored, "experts")[4]


def test_fused_experts_are_read_from_the_ranges_of_each(stored, monkeypatch):
    ranges = [stored[2]["expert.0"], stored[2]["expert.1"]]
    fused = OffloadedTensor.from_byte_range(ranges, "fused", shape=(2, 8, 32))
    expected = torch.stack([stored[1]["expert.0"], stored[1]["expert.1"]])
    assert torch.equal(fused.to_base_tensor(), expected)
    readings = Readings(ranges[0], monkeypatch)
    assert torch.equal(fused[1], expected[1])
    assert readings.take() == 8 * 32 * 4
    with pytest.raises(FormatError, match="takes 1024"):
        OffloadedTensor.from_byte_range(ranges, "fused", shape=(8, 32))
    with pytest.raises(ConfigError, match="fused: the shape of 2 byte ranges"):
        OffloadedTensor.from_byte_range(ranges, "fused")


def test_a_parameter_keeps_class_source_and_pool(stored):
    pool = TensorResidencyPool()
    weight = offloaded(stored, "linear")
    weight.bind_pool(pool)
    parameter = nn.Parameter(weight, requires_grad=False)
    assert isinstance(parameter, OffloadedTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.source is weight.source
    assert parameter.pool is pool
    module = nn.Linear(64, 24)
    module.weight = parameter
    assert list(dict(module.named_parameters())) == ["weight", "bias"]
    assert isinstance(module.state_dict()["weight"], OffloadedTensor)
    assert module.state_dict()["weight"].source is weight.source
    pool.close()


def test_two_tensors_of_one_shape_are_not_equal_for_that(stored):
    first, second = offloaded(stored, "expert.0"), offloaded(stored, "expert.1")
    assert torch.equal(first, offloaded(stored, "expert.0"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.bfloat16}, {"device": "meta"}, {"device": "cpu", "copy": True}], ids=str
)
def test_to_gives_another_tensor_over_the_same_bytes(stored, change):
    weight = offloaded(stored, "linear")
    other = weight.to(**change)
    assert isinstance(other, OffloadedTensor)
    assert other.dtype == change.get("dtype", torch.float32)
    assert other.device.type == change.get("device", "cpu")
    assert not other.is_meta
    assert other.source is not weight.source
    if change.get("device") != "meta":
        assert torch.equal(other.to_base_tensor(), stored[1]["linear"].to(other.dtype))
    assert other.source_range == weight.source_range
    assert weight.to("cpu") is weight


def test_a_module_can_be_moved_and_cast(stored):
    module = nn.Linear(64, 24)
    module.weight = nn.Parameter(offloaded(stored, "linear"), requires_grad=False)
    module.to(torch.bfloat16)
    assert isinstance(module.weight, OffloadedTensor)
    assert module.weight.dtype == torch.bfloat16
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    expected = F.linear(x, stored[1]["linear"].to(torch.bfloat16), module.bias)
    assert torch.equal(module(x), expected)


def test_a_deep_copied_model_has_sources_and_a_pool_of_its_own(stored):
    pool = TensorResidencyPool(10_000, strategy=ResidencyStrategy.LEARNED)
    model = nn.Sequential(nn.Linear(64, 24), nn.Linear(64, 24))
    tied = nn.Parameter(offloaded(stored, "linear"), requires_grad=False)
    tied.bind_pool(pool)
    model[0].weight = model[1].weight = tied
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight.pool not in (None, pool)
    assert twin[0].weight.pool.max_cached_bytes == 10_000
    twin[0].weight.mul_(0)
    assert torch.equal(tied.to_base_tensor(), stored[1]["linear"])
    assert twin[1].weight.to_base_tensor().abs().sum() == 0
    pool.close()


def test_a_scope_goes_before_the_bound_pool_and_a_closed_pool_is_passed_over(stored):
    bound, scoped = TensorResidencyPool(), TensorResidencyPool()
    weight = offloaded(stored, "linear")
    weight.bind_pool(bound)
    with scoped.scope():
        weight.reload()
    assert scoped.is_resident(weight)
    assert not bound.is_resident(weight)
    with scoped.scope("meta"):
        assert weight.reload().is_meta
    scoped.close()
    bound.close()
    assert torch.equal(weight.reload(), stored[1]["linear"])


def test_values_loaded_in_inference_mode_can_be_trained_with_later(stored):
    with TensorResidencyPool() as pool:
        weight = offloaded(stored, "linear")
        weight.bind_pool(pool)
        with torch.inference_mode():
            F.linear(torch.randn(1, 64), weight)
        x = torch.randn(2, 64, requires_grad=True)
        F.linear(x, weight).sum().backward()
        assert torch.allclose(x.grad, stored[1]["linear"].sum(0).expand(2, 64))


@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "direct"])
@pytest.mark.parametrize("name", ["linear", "table"])
def test_a_truncated_file_is_named_and_works_again_when_restored(stored, pooled, name):
    path, values, _ = stored
    weight = offloaded(stored, name)
    pool = TensorResidencyPool()
    weight.bind_pool(pool if pooled else None)
    content, time_ns, _ = stamp(path)
    os.truncate(path, len(content) // 2)
    for read in (weight.reload, lambda: F.embedding(torch.tensor([1]), weight)):
        with pytest.raises(StorageError, match=f"model.safetensors, tensor '{name}'"):
            read()
    with pytest.raises(StorageError, match=name):
        pool.prefetch(weight).wait()
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    assert torch.equal(weight.reload(), values[name])
    assert torch.equal(F.embedding(torch.tensor([1]), weight), values[name][[1]])
    pool.close()


def test_an_error_names_the_parameter_when_the_file_has_another_name_for_it(stored):
    path, _, index = stored
    weight = OffloadedTensor.from_byte_range(index["linear"], "model.layers.0.weight")
    os.truncate(path, 100)
    with pytest.raises(StorageError, match=r"model.layers.0.weight: .*'linear'"):
        weight.reload()


def test_a_tensor_in_memory_is_shown_in_another_dtype(stored):
    half = stored[1]["half"]
    shown = OffloadedTensor.over(half, torch.float32, "half")
    assert shown.dtype == torch.float32
    assert torch.equal(shown.to_base_tensor(), half.float())
    assert torch.equal(F.embedding(torch.tensor([2]), shown), half.float()[[2]])
    assert shown.source_range is None
    again = OffloadedTensor.over(offloaded(stored, "half"), torch.float32, "half")
    assert torch.equal(again.to_base_tensor(), half.float())
    same = OffloadedTensor.over(half, torch.bfloat16, "half")
    same.mul_(0)
    assert half.abs().sum() > 0


def test_original_tensors_go_to_a_private_file(stored, tmp_path):
    plain = stored[1]["linear"]
    weight = OffloadedTensor.from_original_tensor(plain, "w", offload_dir=tmp_path / "spill")
    assert list((tmp_path / "spill").iterdir()) == []
    assert torch.equal(weight.to_base_tensor(), plain)
    assert weight.source_range is None
    assert weight.stored_state() is None
    assert weight.inner_class is None


def test_the_constructor_of_torch_to_nnef_offloads_what_it_is_given(tmp_path):
    plain = torch.randn(3, 4)
    weight = OffloadedTensor(plain, "cpu", tmp_path, "w", torch.Tensor, storage_id="w-1")
    assert torch.equal(weight.to_base_tensor(), plain)
    assert weight.name == "w"
    assert weight.source.key.startswith("w-1#")
    with pytest.raises(ConfigError, match="w is on the meta device"):
        OffloadedTensor(torch.empty(3, device="meta"), "cpu", tmp_path, "w")
    with pytest.raises(ConfigError, match="expected a Parameter"):
        OffloadedTensor(plain, "cpu", tmp_path, "w", nn.Parameter)


def test_a_slice_of_longer_inputs_is_multiplied_without_a_copy_of_the_weight(stored):
    # torch expands and copies a frozen weight for it, see dense_product; what comes out is the same.
    weight = nn.Parameter(offloaded(stored, "linear"), requires_grad=False)
    x = torch.randn(1, 8, 64)[:, -1:]
    assert x.stride() == (8 * 64, 64, 1)
    with torch.profiler.profile() as profile:
        found = F.linear(x, weight)
    assert not {"aten::bmm", "aten::expand"} & {event.key for event in profile.key_averages()}
    assert torch.equal(found, F.linear(x.clone(memory_format=torch.contiguous_format), stored[1]["linear"]))
