import pytest
import torch
from offload_cases import checkpoint, stamp
from torch import nn

from t2n_hf.errors import InPlaceError, StorageError
from t2n_hf.residency import TensorResidencyPool
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly


@pytest.fixture
def stored(tmp_path):
    return checkpoint(tmp_path)


def set_item(w):
    w[0] = 0


def set_rows(w):
    w[1:3, 5] = torch.arange(2.0)


def set_mask(w):
    w[w > 0] = -1


def set_data(w):
    w.data = torch.full((24, 64), 2.5)


def add_out(w):
    torch.add(torch.ones(24, 64), 1, out=w)


def foreach(w):
    torch._foreach_mul_([w, w], 2)


WRITES = {
    "copy_": lambda w: w.copy_(torch.arange(64.0)),
    "copy_ of another dtype": lambda w: w.copy_(torch.ones(24, 64, dtype=torch.float64)),
    "mul_": lambda w: w.mul_(3),
    "mul_ by itself": lambda w: w.mul_(w),
    "imul": lambda w: w.__imul__(2),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(1.5),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "item": set_item,
    "rows": set_rows,
    "mask": set_mask,
    "data": set_data,
    "out": add_out,
    "foreach": foreach,
    "index_add_": lambda w: w.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 64)),
    "set_": lambda w: w.set_(torch.ones(24, 64)),
    "index_put_": lambda w: w.index_put_((torch.tensor([0, 2]),), torch.ones(2, 64)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 64, dtype=torch.int64), 5.0),
    "masked_fill_": lambda w: w.masked_fill_(torch.eye(24, 64, dtype=torch.bool), 2),
    "lerp_": lambda w: w.lerp_(torch.ones(24, 64), 0.25),
    "addcmul_": lambda w: w.addcmul_(torch.ones(24, 64), torch.ones(24, 64)),
    "matmul into it": lambda w: torch.mm(torch.ones(24, 8), torch.ones(8, 64), out=w),
    "a slice, worked out and put back": lambda w: w.__setitem__(slice(1, 3), w[1:3] * 2),
    "init": lambda w: nn.init.constant_(w, 4.0),
    "update_values": lambda w: (w.update_values if isinstance(w, OffloadedTensor) else w.copy_)(torch.ones(24, 64)),
}


@pytest.mark.parametrize("place", ["direct", "bound", "scoped"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_persists_and_never_reaches_the_users_file(stored, write, place):
    path, values, index = stored
    before = stamp(path)
    expected = values["linear"].clone()
    weight = nn.Parameter(OffloadedTensor.from_byte_range(index["linear"], "linear"), requires_grad=False)
    pool = TensorResidencyPool()
    if place != "direct":
        pool.pin(weight).wait()
    if place == "bound":
        weight.bind_pool(pool)
    with torch.no_grad():
        WRITES[write](expected)
        if place == "scoped":
            with pool.scope():
                WRITES[write](weight)
        else:
            WRITES[write](weight)
    assert isinstance(weight, OffloadedTensor)
    assert torch.equal(weight.to_base_tensor(), expected)
    assert torch.equal(pool.resolve(weight), expected)
    assert torch.equal(weight.detach()[0], expected[0])
    assert weight.source_range is None
    assert stamp(path) == before
    pool.close()


def test_in_place_operators_return_the_tensor_itself(stored):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    assert weight.mul_(2) is weight
    same = weight
    weight *= 2
    assert weight is same
    assert torch.equal(weight.to_base_tensor(), stored[1]["linear"] * 4)


def test_what_was_written_is_seen_by_every_alias_and_by_no_copy(stored):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    alias, copied, cast = weight.detach(), weight.clone(), weight.to(torch.bfloat16)
    weight.zero_()
    assert alias.to_base_tensor().abs().sum() == 0
    assert torch.equal(copied.to_base_tensor(), stored[1]["linear"])
    assert torch.equal(cast.to_base_tensor(), stored[1]["linear"].to(torch.bfloat16))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.resize_(2, 2),
        lambda w: w.t_(),
        lambda w: w.unsqueeze_(0),
        lambda w: w.set_(torch.ones(24, 64).untyped_storage(), 0, (24, 64)),
        lambda w: w.update_values(torch.ones(2, 2)),
        lambda w: w.update_values(torch.ones(24, 64, dtype=torch.float16)),
        lambda w: w.T.zero_(),
        lambda w: w[0].mul_(2),
        lambda w: w.view(-1).fill_(0),
    ],
    ids=[
        "resize_",
        "t_",
        "unsqueeze_",
        "set_ of a storage",
        "shape",
        "dtype",
        "of a transposed",
        "of an item",
        "of a view",
    ],
)
def test_what_cannot_persist_is_refused_by_name(stored, write):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "model.layers.3.weight")
    with pytest.raises(InPlaceError, match=r"model\.layers\.3\.weight"):
        write(weight)
    assert weight.shape == (24, 64)
    assert torch.equal(weight.to_base_tensor(), stored[1]["linear"])


@pytest.mark.parametrize(
    "value", [torch.ones(3, 5), torch.ones(24, 64, dtype=torch.float16), torch.ones(24, 64, dtype=torch.int64)], ids=str
)
def test_data_and_unstrict_values_may_have_another_shape_and_dtype(stored, value):
    for name in ("data", "update", "set_"):
        weight = nn.Parameter(OffloadedTensor.from_byte_range(stored[2]["linear"], name), requires_grad=False)
        if name == "data":
            weight.data = value
        elif name == "set_":
            assert weight.set_(value) is weight
        else:
            weight.update_values(value, strict_shape=False, strict_dtype=False)
        assert isinstance(weight, OffloadedTensor)
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype) == (value.shape, value.dtype)
        assert torch.equal(weight.to_base_tensor(), value)
        assert weight.name == name


def test_data_of_another_offloaded_tensor_is_shared_until_one_is_written(stored):
    first = OffloadedTensor.from_byte_range(stored[2]["expert.0"], "first")
    second = OffloadedTensor.from_byte_range(stored[2]["expert.1"], "second")
    first.data = second
    second.zero_()
    assert torch.equal(first.to_base_tensor(), stored[1]["expert.1"])
    first.data = first.data
    assert torch.equal(first.to_base_tensor(), stored[1]["expert.1"])


def test_a_read_write_lease_is_stored_when_the_pool_lets_go(stored):
    path, values, index = stored
    before = stamp(path)
    weight = OffloadedTensor.from_byte_range(index["half"], "half", dtype=torch.float32)
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool)
        with pool.acquire(weight, mode="read_write") as value:
            value.mul_(2)
        # Copies and writes take what is not stored yet.
        copied = weight.clone()
        weight.add_(1)
    expected = values["half"].float() * 2
    assert torch.equal(copied.to_base_tensor(), expected)
    assert torch.equal(weight.to_base_tensor(), expected + 1)
    assert stamp(path) == before


def test_a_full_disk_leaves_the_older_values(stored, monkeypatch):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")

    def full(*args):
        raise StorageError(28, "No space left on device")

    monkeypatch.setattr("t2n_hf.store.spill.Spill.put", full)
    with pytest.raises(StorageError, match="No space left"):
        weight.mul_(2)
    assert torch.equal(weight.to_base_tensor(), stored[1]["linear"])


def test_many_writes_use_the_space_of_the_file_again(stored, tmp_path):
    weight = OffloadedTensor.from_original_tensor(stored[1]["linear"], "w", offload_dir=tmp_path / "spill")
    spill = weight.source.content._stored._spill
    for _ in range(50):
        weight.add_(1)
    assert spill.nbytes <= 3 * weight.nbytes_loaded
    assert weight.source.content._stored._spill is spill


def test_a_packed_value_takes_only_packed_values_in_place(stored):
    plain = stored[1]["linear"]
    packed = QTensorTractScaleOnly.quantize(plain)
    weight = OffloadedTensor.from_original_tensor(packed, "packed")
    for write in (lambda w: w.mul_(2), lambda w: w.copy_(plain), lambda w: w.__setitem__(0, 0)):
        with pytest.raises(InPlaceError, match="packed"):
            write(weight)
    other = QTensorTractScaleOnly.quantize(plain * 3)
    weight.copy_(other)
    assert weight.inner_class is QTensorTractScaleOnly
    assert torch.equal(weight.to_base_tensor(), other.to_base_tensor())
    weight.copy_(OffloadedTensor.from_original_tensor(packed, "again"))
    assert torch.equal(weight.to_base_tensor(), packed.to_base_tensor())
    weight.data = plain
    assert weight.inner_class is None
    assert torch.equal(weight.to_base_tensor(), plain)


def test_a_plain_weight_can_be_replaced_by_its_quantized_form(stored):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    packed = QTensorTractScaleOnly.quantize(stored[1]["linear"])
    weight.update_values(packed)
    assert weight.inner_class is QTensorTractScaleOnly
    assert torch.equal(weight.to_base_tensor(), packed.to_base_tensor())
    weight.update_values(stored[1]["linear"])
    weight.copy_(packed)
    assert weight.inner_class is None
    assert torch.equal(weight.to_base_tensor(), packed.to_base_tensor())


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_inference_mode_persists_too(stored, write):
    expected = stored[1]["linear"].clone()
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    with torch.inference_mode():
        WRITES[write](expected)
        WRITES[write](weight)
    assert torch.equal(weight.to_base_tensor(), expected)


@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "direct"])
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.chunk(2)[0].mul_(0),
        lambda w: w.unbind()[1].sub_(1),
        lambda w: w.diagonal().fill_(1),
        lambda w: w[1:3][0].add_(1),
        lambda w: w.transpose(0, 1)[0].zero_(),
        lambda w: w.mT.zero_(),
        lambda w: torch.add(torch.ones(24 * 64), 1, out=w.view(-1)),
    ],
    ids=["chunk", "unbind", "diagonal", "slice", "transpose", "mT", "out"],
)
def test_a_write_to_a_view_is_refused_and_nothing_changes(stored, write, pooled):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool if pooled else None)
        with pytest.raises(InPlaceError, match="linear"):
            write(weight)
        assert torch.equal(weight.to_base_tensor(), stored[1]["linear"])
