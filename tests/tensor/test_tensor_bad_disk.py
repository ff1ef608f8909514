"""Disks and files that fail while weights are offloaded: the error names file and tensor, and nothing is lost."""

import errno
import os

import pytest
import torch
import torch.nn.functional as F
from offload_cases import checkpoint
from torch import nn

from t2n_hf.errors import StorageError
from t2n_hf.residency import TensorResidencyPool
from t2n_hf.store import checkpoint as checkpoint_module
from t2n_hf.store import spill as spill_module
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly

USES = {
    "values": lambda w: w + 0,
    "product": lambda w: F.linear(torch.ones(1, 16), w),
    "rows": lambda w: F.embedding(torch.tensor([3, 7]), w),
    "item": lambda w: w[5],
    "clone and add": lambda w: w.clone() + 1,
}
EVERY_USE = pytest.mark.parametrize("use", USES.values(), ids=USES)
POOLED = pytest.mark.parametrize("pooled", [True, False], ids=["pool", "direct"])


@pytest.fixture
def stored(tmp_path):
    return checkpoint(tmp_path)


@pytest.fixture
def table(stored):
    return OffloadedTensor.from_byte_range(stored[2]["table"], "model.embed.weight")


@pytest.fixture
def pool():
    with TensorResidencyPool(8192) as made:
        yield made


def failing_once(monkeypatch, module, error):
    """Let the next read of `module` fail."""
    read, failures = module.read_at, [error]

    def fails(*args):
        if failures:
            raise failures.pop()
        return read(*args)

    monkeypatch.setattr(module, "read_at", fails)


@EVERY_USE
@POOLED
def test_a_truncated_checkpoint_is_named_and_works_again_when_it_is_back(stored, table, pool, use, pooled):
    path, values, _ = stored
    table.bind_pool(pool if pooled else None)
    content, status = path.read_bytes(), os.stat(path)
    os.truncate(path, len(content) // 2)
    with pytest.raises(StorageError, match=r"model\.embed\.weight: .*model\.safetensors, tensor 'table'"):
        use(table)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(use(table), use(values["table"]))
    assert pool.lease_count == 0


@EVERY_USE
def test_a_checkpoint_replaced_by_another_file_is_read_on_and_one_written_over_is_noticed(stored, table, use):
    path, values, _ = stored
    other = path.with_name("other")
    other.write_bytes(bytes(len(path.read_bytes())))
    kept = os.open(path, os.O_RDWR)
    os.replace(other, path)
    assert torch.equal(use(table), use(values["table"]))
    os.pwrite(kept, b"\0" * 64, os.fstat(kept).st_size - 64)
    os.close(kept)
    with pytest.raises(StorageError, match=r"model\.safetensors.* changed since it was opened.*load the checkpoint"):
        use(table)


@EVERY_USE
@POOLED
@pytest.mark.parametrize("place", ["checkpoint", "spill"])
def test_one_failed_read_is_an_error_and_the_next_one_works(table, pool, monkeypatch, use, pooled, place):
    weight = table if place == "checkpoint" else OffloadedTensor.from_original_tensor(table, table.name)
    expected = use(weight)
    if place == "spill":
        weight.add_(0)
    weight.bind_pool(pool if pooled else None)
    module = checkpoint_module if place == "checkpoint" else spill_module
    failing_once(monkeypatch, module, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(StorageError, match=r"model\.embed\.weight.*Input/output error") as caught:
        use(weight)
    assert caught.value.errno == errno.EIO
    assert torch.equal(use(weight), expected)
    assert pool.lease_count == 0


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("where", ["at once", "in the middle"])
def test_a_full_disk_while_spilling_keeps_what_was_there(tmp_path, monkeypatch, packed, where):
    values = torch.randn(64, 64)
    make = QTensorTractScaleOnly.quantize if packed else torch.clone
    weight = OffloadedTensor.from_original_tensor(make(values), "layer.weight", tmp_path)
    before = weight.to_base_tensor()
    write, done = os.pwrite, []

    def full(fd, view, offset):
        if where == "at once" or done:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(1)
        return write(fd, view[: len(view) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "pwrite", full)
        for attempt in (
            lambda: weight.update_values(make(values * 2)),
            lambda: weight.copy_(make(values * 2)),
            lambda: OffloadedTensor.from_original_tensor(make(values), "layer.weight", tmp_path),
        ):
            done.clear()
            with pytest.raises(StorageError, match=r"layer\.weight: cannot spill .*No space left") as caught:
                attempt()
            assert caught.value.errno == errno.ENOSPC
            assert str(tmp_path) in str(caught.value)
        assert torch.equal(weight.to_base_tensor(), before)
    weight.copy_(make(values * 2))
    assert torch.equal(weight.to_base_tensor(), before * 2)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_while_a_pool_writes_back_keeps_the_modified_value(tmp_path, monkeypatch):
    weight = OffloadedTensor.from_original_tensor(torch.ones(8, 8), "layer.weight", tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with TensorResidencyPool() as pool:
        with pool.acquire(weight, mode="read_write") as value:
            value.mul_(3)
        with monkeypatch.context() as patch:
            patch.setattr(spill_module.os, "pwrite", full)
            with pytest.raises(StorageError, match=r"layer\.weight: cannot spill"):
                pool.flush()
        assert pool.resolve(weight).unique().item() == 3
        pool.flush()
    assert weight.to_base_tensor().unique().item() == 3


def test_a_folder_that_cannot_be_written_is_named_with_the_tensor(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    weight = OffloadedTensor.from_original_tensor(torch.ones(8, 8), "kept", tmp_path)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(spill_module.tempfile, "TemporaryFile", refused)
        with pytest.raises(StorageError, match=r"layer\.weight: cannot make a spill file in .*: Permission"):
            OffloadedTensor.from_original_tensor(torch.ones(8, 8), "layer.weight", other)
    weight.mul_(2)
    assert weight.to_base_tensor().unique().item() == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"layer\.weight: cannot make a spill file"):
        OffloadedTensor.from_original_tensor(torch.ones(8, 8), "layer.weight", tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_by_the_system(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"layer\.weight: cannot make a spill file in .*Permission denied"):
        OffloadedTensor.from_original_tensor(torch.ones(8, 8), "layer.weight", tmp_path)


def test_two_models_in_one_folder_never_see_each_other(tmp_path):
    models = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    values = [model.weight.detach().clone() for model in models]
    for model in models:
        off = OffloadedTensor.from_original_tensor(model.weight.detach(), "weight", tmp_path)
        model.weight = nn.Parameter(off, requires_grad=False)
    models[0].weight.zero_()
    assert torch.equal(models[1].weight.to_base_tensor(), values[1])
    del models[0]
    OffloadedTensor.from_original_tensor(torch.ones(8, 8), "weight", tmp_path)
    assert torch.equal(models[0].weight.to_base_tensor(), values[1])
    assert os.listdir(tmp_path) == []
