"""Who owns the bytes of offloaded tensors: aliases share them, copies keep theirs, the last owner gives them back."""

import copy
import gc
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.residency import TensorResidencyPool
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly

NBYTES = 1 << 20


def offload(folder, value=1.0):
    return OffloadedTensor.from_original_tensor(torch.full((NBYTES // 4,), value), "w", folder)


def taken(weight):
    """Bytes of disk that the spill of `weight` takes."""
    return os.fstat(weight.source.content._stored._spill._fd).st_blocks * 512


COPIES = {
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "cast": lambda w: w.to(torch.float16),
    "parameter's deepcopy": lambda w: copy.deepcopy(nn.Parameter(w, requires_grad=False)),
    "offloaded again": lambda w: OffloadedTensor.from_original_tensor(w, "again"),
    "another in its data": lambda w: _data(OffloadedTensor.from_original_tensor(torch.ones(3), "other"), w),
}
ALIASES = {
    "detach": lambda w: w.detach(),
    "parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "copy": copy.copy,
    "state dict": lambda w: _module(w).state_dict()["weight"],
}


def _data(target, source):
    target.data = source
    return target


def _module(weight):
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_keeps_the_bytes_that_its_original_gives_up(tmp_path, make):
    keeper = OffloadedTensor.from_original_tensor(torch.ones(1), "keeper", tmp_path)
    base = taken(keeper)
    weight = offload(tmp_path, 5.0)
    one = taken(keeper)
    assert one >= base + NBYTES
    twin = make(weight)
    assert taken(keeper) == one, "copies are made when one of them is written"
    weight.fill_(2)
    assert taken(keeper) >= base + 2 * NBYTES
    assert twin.to_base_tensor().unique().item() == 5
    del weight
    assert base + NBYTES <= taken(keeper) <= one + 4096
    assert twin.to_base_tensor().unique().item() == 5
    del twin
    gc.collect()
    assert taken(keeper) <= base + 4096


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
def test_an_alias_sees_writes_and_keeps_the_bytes_alive(tmp_path, make):
    keeper = OffloadedTensor.from_original_tensor(torch.ones(1), "keeper", tmp_path)
    base = taken(keeper)
    weight = offload(tmp_path)
    alias = make(weight)
    for value, writer in ((2, weight), (3, alias)):
        writer.fill_(value)
        assert taken(keeper) <= base + NBYTES + 8192, "what was written over is gone"
        assert [t.to_base_tensor().unique().item() for t in (weight, alias)] == [value, value]
    del weight, writer
    assert alias.to_base_tensor().unique().item() == 3
    del alias
    gc.collect()
    assert taken(keeper) <= base + 4096


def test_a_value_that_a_pool_holds_or_a_reader_uses_outlives_the_tensor(tmp_path):
    weight = offload(tmp_path)
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool)
        lease = pool.acquire(weight)
        value = lease.open()
        weight.fill_(2)
        assert value.unique().item() == 1
        lease.release()
        row = weight[:1000]
        del weight
        gc.collect()
        assert row.unique().item() == 2
        pool.flush()


def test_the_garbage_collector_may_end_tensors_in_any_thread(tmp_path):
    keeper = OffloadedTensor.from_original_tensor(torch.ones(1), "keeper", tmp_path)
    failures = []

    def work(number):
        try:
            for step in range(12):
                value = float(100 * number + step)
                ring = [OffloadedTensor.from_original_tensor(torch.full((5000 + number,), value), "w", tmp_path)]
                ring.append(ring)
                ring[0].add_(1)
                twin = ring[0].clone()
                assert ring[0].to_base_tensor().unique().item() == value + 1
                del ring
                gc.collect(0)
                assert twin.to_base_tensor().unique().item() == value + 1
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures
    assert keeper.to_base_tensor().item() == 1
    assert taken(keeper) <= 3 * 20480


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_writes_to_a_tied_parameter_are_seen_through_pool_scope_and_alias(packed):
    model = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Linear(32, 4, bias=False))
    make = QTensorTractScaleOnly.quantize if packed else torch.clone
    weight = nn.Parameter(OffloadedTensor.from_original_tensor(make(torch.ones(4, 32)), "w"), requires_grad=False)
    model[0].weight = model[1].weight = weight
    x, other = torch.ones(1, 32), TensorResidencyPool()
    with TensorResidencyPool() as pool, other:
        weight.bind_pool(pool)
        for number, writer in enumerate((weight, weight.detach(), model[1].weight), start=2):
            with other.scope():
                before = model[1](x)
                writer.copy_(make(torch.full((4, 32), float(number))))
                inside = model[0](x)
            assert not torch.equal(inside, before)
            assert torch.equal(inside, model[1](x))
            assert torch.equal(inside, torch.full((1, 4), 32.0 * number))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pool"])
def test_an_optimizer_trains_an_offloaded_parameter_as_it_does_a_plain_one(make, pooled):
    torch.manual_seed(0)
    plain = nn.Linear(8, 4)
    model = copy.deepcopy(plain)
    off = OffloadedTensor.from_original_tensor(plain.weight.detach(), "w")
    model.weight = nn.Parameter(off, requires_grad=True)
    x = torch.randn(5, 8)
    with TensorResidencyPool() as pool:
        off.bind_pool(pool if pooled else None)
        for trained in (plain, model):
            optimizer = make(trained.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                F.mse_loss(trained(x), torch.ones(5, 4)).backward()
                optimizer.step()
        assert isinstance(model.weight, OffloadedTensor)
        assert torch.allclose(model.weight.to_base_tensor(), plain.weight, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_readers_see_each_value_whole_while_another_thread_writes(tmp_path, packed):
    make = QTensorTractScaleOnly.quantize if packed else torch.clone
    weight = OffloadedTensor.from_original_tensor(make(torch.ones(64, 1024)), "w", tmp_path)
    done, mixed = threading.Event(), []

    def read(use):
        while not done.is_set():
            found = use(weight).unique()
            if found.numel() != 1:
                mixed.append(found)

    uses = (lambda w: w.to_base_tensor(), lambda w: w[3:40], lambda w: F.embedding(torch.tensor([1, 5, 60]), w))
    threads = [threading.Thread(target=read, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for number in range(2, 40):
        weight.copy_(make(torch.full((64, 1024), float(number))))
    done.set()
    for thread in threads:
        thread.join()
    assert not mixed
    assert weight.to_base_tensor().unique().item() == 39


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "q4_0"])
def test_a_read_that_finds_its_pool_closed_by_another_thread_goes_without(monkeypatch, packed):
    values, x = torch.randn(4, 32), torch.randn(2, 32)
    values = QTensorTractScaleOnly.quantize(values) if packed else values
    weight = OffloadedTensor.from_original_tensor(values, "w")
    weight.bind_pool(pool := TensorResidencyPool())
    resolve = TensorResidencyPool.resolve

    def late(pool, *wanted):
        pool.close()
        return resolve(pool, *wanted)

    monkeypatch.setattr(TensorResidencyPool, "resolve", late)
    assert torch.equal(F.linear(x, weight), F.linear(x, values))
    assert pool.closed
