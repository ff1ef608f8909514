"""An interrupt, wherever it comes in the leases of modules, leaves nothing once the model runs again."""

from pathlib import Path

import torch
from interrupts import interrupted, needs_known_points
from torch import nn

import t2n_hf.residency
from t2n_hf.hf import hooks
from t2n_hf.hf.hooks import attach_pools, leases_of
from t2n_hf.tensor.offload import OffloadedTensor

PLACES = (hooks.__file__, str(Path(t2n_hf.residency.__file__).parent))


def chain(count, width):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    for layer in layers:
        layer.weight = nn.Parameter(OffloadedTensor.from_original_tensor(layer.weight.detach(), "w"), False)
    return layers


@needs_known_points
def test_wherever_an_interrupt_comes_in_a_forward_the_next_one_is_right_and_leaves_no_lease():
    x = torch.ones(1, 4)
    model = chain(2, 4)
    expected = model(x)
    attach_pools(model, {torch.device("cpu"): 64}, readahead_nbytes=0)
    pool = leases_of(model).pool
    at, where = 0, ()
    while where is not None:
        at += 1
        where = interrupted(lambda: model(x), at, *PLACES)
        assert torch.equal(model(x), expected), where
        assert (pool.lease_count, pool.used_bytes, pool.peak_bytes) == (0, 64, 64), where
    assert at > 100
