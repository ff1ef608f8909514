"""Rows of tensors on disk: the values of the whole tensor, and no bytes of other rows."""

import os

import pytest
import torch
import torch.nn.functional as F
from offload_cases import Readings, checkpoint

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.errors import FormatError
from t2n_hf.hf.disk_sources import StoredParts
from t2n_hf.hf.stored import StoredForm
from t2n_hf.residency import TensorResidencyPool
from t2n_hf.store import checkpoint as checkpoint_module
from t2n_hf.store import spill as spill_module
from t2n_hf.tensor import OffloadedTensor, OpaqueTensor, QTensorTractScaleOnly
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.transposed import TransposedTensor


@pytest.fixture
def bytes_read(monkeypatch):
    """Count what comes from files, of the spill and of checkpoints."""
    counted = []

    def watched(read):
        def watch(fd, part, offset):
            counted.append(len(part))
            return read(fd, part, offset)

        return watch

    for module in (checkpoint_module, spill_module):
        monkeypatch.setattr(module, "read_at", watched(module.read_at))

    def take():
        taken = sum(counted)
        counted.clear()
        return taken

    return take


def on_disk(packed, folder, shape):
    """Leave the parts of a packed tensor in a safetensors file, as a saved checkpoint does."""
    from safetensors.torch import save_file

    from t2n_hf.store.checkpoint import CheckpointIndex

    state = packed.to_offload_state()
    path = folder / "packed.safetensors"
    save_file({name: part.contiguous() for name, part in state["tensors"].items()}, path)
    index = CheckpointIndex.open(path)
    form = StoredForm(state["tag"], tuple(state["tensors"]), state["meta"])
    content = StoredParts("w", form, {name: index[name] for name in index}, type(packed))
    return OffloadedTensor.from_source(StoredSource(content, shape, packed.dtype, "w"))


def spilled(packed, folder, shape):
    return OffloadedTensor.from_original_tensor(packed, "w", folder)


PLACES = pytest.mark.parametrize("place", [on_disk, spilled], ids=["checkpoint", "spill"])
INDICES = {
    "one": torch.tensor([7]),
    "grid": torch.tensor([[3, 40], [3, 4]]),
    "none": torch.empty(0, dtype=torch.int64),
}


@pytest.mark.parametrize("indices", INDICES)
def test_a_gather_from_a_plain_spill_reads_only_its_rows(tmp_path, bytes_read, indices):
    table = torch.randn(50, 16)
    weight = OffloadedTensor.from_original_tensor(table, "table", tmp_path)
    found = F.embedding(INDICES[indices], weight)
    assert torch.equal(found, F.embedding(INDICES[indices], table))
    if len(INDICES[indices]):
        assert bytes_read() == INDICES[indices].unique().numel() * 16 * 4


@PLACES
@pytest.mark.parametrize("indices", INDICES)
def test_a_gather_from_a_packed_table_reads_only_its_rows(tmp_path, bytes_read, place, indices):
    packed = QTensorTractScaleOnly.quantize(torch.randn(50, 64))
    weight = place(packed, tmp_path, (50, 64))
    expected = F.embedding(INDICES[indices], packed.to_base_tensor())
    assert torch.equal(F.embedding(INDICES[indices], weight), expected)
    if len(INDICES[indices]):
        assert bytes_read() == INDICES[indices].unique().numel() * 2 * 18


@PLACES
@pytest.mark.parametrize("compute", ["exact", "fast"])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_one_expert_of_a_packed_weight_reads_only_its_bytes(tmp_path, bytes_read, place, compute, turned):
    packed = QTensorTractScaleOnly.quantize(torch.randn(6, 32, 64)).with_compute(compute)
    whole = TransposedTensor.over(packed) if turned else packed
    weight = place(whole, tmp_path, tuple(whole.shape))
    size = weight.source.content.nbytes
    expert = weight[4]
    assert bytes_read() == size // 6
    assert isinstance(expert, type(whole))
    assert torch.equal(expert.to_base_tensor(), whole.to_base_tensor()[4])
    x = torch.randn(3, expert.shape[1])
    assert torch.allclose(F.linear(x, expert), F.linear(x, whole.to_base_tensor()[4]), rtol=0.02, atol=0.1)
    assert torch.equal(weight[-1].to_base_tensor(), whole.to_base_tensor()[-1])
    bytes_read()
    assert torch.equal(weight[torch.tensor([1, -5])], whole.to_base_tensor()[[1, 1]])
    assert bytes_read() == size // 6
    assert torch.equal(weight[2:4], whole.to_base_tensor()[2:4])
    assert bytes_read() == size // 3


def test_an_index_behind_the_first_axis_means_what_it_does_in_torch(tmp_path):
    values = torch.randn(6, 8, 32)
    packed = QTensorTractScaleOnly.quantize(values)
    dense = packed.to_base_tensor()
    weight = OffloadedTensor.from_original_tensor(packed, "w", tmp_path)
    for index in [(2, slice(1, 3)), (2, slice(None), torch.tensor([0, 5])), (slice(0, 2), 1), (0, 0, 0), (..., 1)]:
        assert torch.equal(weight[index], dense[index])
    with pytest.raises(IndexError):
        weight[6]


@pytest.mark.parametrize("inner", [None, QTensorTractScaleOnly], ids=["plain", "packed"])
def test_rows_come_from_the_pool_when_it_has_the_tensor(tmp_path, bytes_read, inner):
    values = torch.randn(50, 64)
    value = values if inner is None else inner.quantize(values)
    weight = OffloadedTensor.from_original_tensor(value, "w", tmp_path)
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool)
        pool.pin(weight).wait()
        bytes_read()
        found = F.embedding(torch.tensor([3]), weight)
        assert bytes_read() == 0
    assert torch.equal(found[0], value.to_base_tensor()[3] if inner else values[3])


def test_rows_of_fused_experts_come_from_their_own_ranges(tmp_path, monkeypatch):
    _, values, index = checkpoint(tmp_path)
    weight = OffloadedTensor.from_byte_range([index["expert.0"], index["expert.1"]], "experts", shape=(2, 8, 32))
    readings = Readings(index["expert.0"], monkeypatch)
    assert torch.equal(weight[1], values["expert.1"])
    assert readings.take() == 8 * 32 * 4


def test_many_rows_are_checked_against_a_change_of_the_file_once(tmp_path, monkeypatch):
    _, values, index = checkpoint(tmp_path)
    weight = OffloadedTensor.from_byte_range(index["table"], "table")
    asked = []
    original = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: asked.append(fd) or original(fd))
    rows = torch.arange(0, 40, 3)
    assert torch.equal(F.embedding(rows, weight), values["table"][rows])
    assert len(asked) == 1


class Halves(OpaqueTensor, SupportsOffloadState):
    """Says that its parts have rows, and makes another shape of them."""

    OFFLOAD_STATE_TAG = "rows_test.row_halves.v1"

    @classmethod
    def of(cls, part):
        result = cls._shell((part.shape[0], 4), torch.float32, part.device)
        result.part = part
        return result

    def _parts(self):
        return {"part": self.part}

    def _rebuild(self, parts, dtype):
        return self.of(parts["part"])

    def to_offload_state(self):
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors=self._parts(), meta={})

    @classmethod
    def row_parts(cls, meta, shape):
        return frozenset({"part"})

    @classmethod
    def from_offload_state(cls, state, target_device=None):
        return cls.of(state["tensors"]["part"].repeat(2, 1))


def test_a_class_that_cannot_rebuild_its_rows_is_told_so(tmp_path):
    weight = OffloadedTensor.from_original_tensor(Halves.of(torch.ones(8, 2)), "w", tmp_path)
    with pytest.raises(FormatError, match=r"Halves\.row_parts allows 1 rows"):
        weight[1]
