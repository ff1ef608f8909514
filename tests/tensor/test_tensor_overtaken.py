"""A tensor that is written to directly while a pool, which it is not bound to, holds a modified value of it."""

import pytest
import torch

from t2n_hf.errors import ConfigError, ResidencyError
from t2n_hf.tensor import OffloadedTensor, TensorResidencyPool


def ones():
    return OffloadedTensor.from_original_tensor(torch.ones(4), "layer.weight")


def test_an_open_lease_whose_changes_are_lost_says_so_when_it_ends():
    weight = ones()
    with TensorResidencyPool() as pool:
        lease = pool.acquire(weight, mode="read_write")
        lease.open().add_(1)
        weight.fill_(7)
        with pytest.raises(ResidencyError, match=r"layer\.weight.*lost"):
            lease.release()
        assert pool.lease_count == 0
        assert pool.resident_bytes == 0
        pool.flush()
        assert weight.tolist() == [7] * 4


@pytest.mark.parametrize("end", ["flush", "evict", "close", "displace"])
def test_the_newer_value_is_not_replaced_by_one_that_waits_to_be_written_back(end):
    weight = ones()
    pool = TensorResidencyPool(16)
    with pool.acquire(weight, mode="read_write") as value:
        value.add_(1)
    weight.fill_(7)
    if end == "displace":
        pool.resolve(ones())
    elif end == "evict":
        pool.evict(weight)
    else:
        getattr(pool, end)()
    assert weight.tolist() == [7] * 4
    pool.close()
    assert weight.tolist() == [7] * 4


def test_values_on_the_meta_device_cannot_be_leased_for_writing():
    with TensorResidencyPool() as pool, pytest.raises(ConfigError, match=r"layer\.weight.*meta"):
        pool.acquire(ones(), "meta", "read_write")
