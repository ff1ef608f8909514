import time

import pytest
import torch

from t2n_hf.errors import ConfigError
from t2n_hf.residency import TensorPrefetch, TensorResidencyLease, TensorResidencyPool


class Kept:
    """What a pool calls a source: three in the value's place."""

    key, nbytes = "kept", 8

    def load(self, device):
        return torch.full((2,), 3.0)


class Holder:
    """What a pool calls the holder of one."""

    target_device = torch.device("cpu")

    def __init__(self):
        self.source = Kept()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None], ids=str)
def test_leases_and_handles_can_be_made_for_a_holder_and_any_name_of_a_device(device):
    holder = Holder()
    with TensorResidencyPool() as pool:
        with TensorResidencyLease(pool, holder, device, "read") as value, pool.acquire(holder) as same:
            assert value.tolist() == [3, 3]
            assert same is value
            assert TensorPrefetch(pool, holder, device, None).wait() is value
        assert pool.resident_bytes == 8


@pytest.mark.parametrize("what", [torch.ones(2), None, "weight"], ids=["tensor", "none", "text"])
@pytest.mark.parametrize(
    "method", ["acquire", "resolve", "prefetch", "pin", "unpin", "is_pinned", "is_resident", "evict"]
)
def test_what_is_no_source_is_refused_at_once(what, method):
    with TensorResidencyPool() as pool, pytest.raises(ConfigError, match=f"got a {type(what).__name__}; give an"):
        getattr(pool, method)(what)


def test_a_value_ends_with_its_source_also_just_after_a_worker_has_loaded_it():
    left = []
    with TensorResidencyPool() as pool:
        for _ in range(5):
            holder = Holder()
            pool.prefetch(holder).wait()
            assert pool.is_resident(holder)
            del holder
            time.sleep(0.001)  # the worker goes back to its queue, and waits there for some time
            left.append(pool.resident_bytes)
    assert left == [0] * 5


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="strategy='mru'; expected a ResidencyStrategy, or one of 'lru', 'fixed'"):
        TensorResidencyPool(strategy="mru")
