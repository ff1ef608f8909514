"""Dispatching modules that have offloaded weights already: made by hand, or by a map of a part."""

import pytest
import torch
from torch import nn

from t2n_hf import dispatch_model, plan_placement
from t2n_hf.errors import ConfigError
from t2n_hf.hf.hooks import leases_of
from t2n_hf.tensor.offload import OffloadedTensor

INPUT = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def net(offload=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    if offload:
        value = OffloadedTensor.from_original_tensor(module[0].weight.detach(), "first")
        module[0].weight = nn.Parameter(value, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("device_map", "max_memory", "on_disk"),
    [
        ("cpu", None, False),
        ("auto", {"cpu": 100_000}, False),
        ("auto", {"cpu": 20_000}, True),
        ({"0": "cpu", "2": "disk"}, None, False),
        ({"0": "disk", "2": "cpu"}, None, True),
        ("disk", None, True),
    ],
    ids=["cpu", "enough", "tight", "in", "out", "disk"],
)
def test_weights_that_are_offloaded_already_count_and_go_where_the_map_says(device_map, max_memory, on_disk):
    module = net(offload=True)
    planned = plan_placement(module, None, device_map, max_memory)
    dispatch_model(module, device_map, max_memory=max_memory)
    assert torch.equal(module(INPUT), net()(INPUT))
    assert isinstance(module[0].weight, OffloadedTensor) is on_disk
    assert planned.where["0.weight"] == ("disk" if on_disk else "memory")
    held = sum(p.nbytes for p in module.parameters() if not isinstance(p, OffloadedTensor))
    assert planned.devices[0].resident == held
    assert planned.devices[0].at_once == (64 * 64 * 4 if on_disk else 64 * 32 * 4 if "2" in device_map else 0)


def test_parts_have_maps_of_their_own_and_their_whole_then_none():
    module = net()
    dispatch_model(module[0], "disk")
    dispatch_model(module[2], "disk")
    assert torch.equal(module(INPUT), net()(INPUT))
    with pytest.raises(ConfigError, match="0 of this Sequential has a device map already"):
        dispatch_model(module, "disk")
    assert torch.equal(module(INPUT), net()(INPUT))
    assert leases_of(module) is None


@pytest.mark.parametrize(
    ("device_map", "max_memory"), [("disk", None), ("auto", {"cpu": 20_000})], ids=["disk", "auto"]
)
def test_plain_weights_on_disk_are_trained_once_gradients_are_asked_for(device_map, max_memory):
    module, expected = dispatch_model(net(), device_map, max_memory=max_memory), net()
    assert not any(p.requires_grad for p in module.parameters() if isinstance(p, OffloadedTensor))
    module.requires_grad_(True)
    for one in (module, expected):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            one(INPUT).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(module(INPUT), expected(INPUT), atol=1e-4, rtol=1e-4)
