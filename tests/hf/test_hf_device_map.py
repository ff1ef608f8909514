import pytest
import torch
from torch import nn

from t2n_hf import T2NConfig
from t2n_hf.errors import BudgetError
from t2n_hf.hf.dispatch.entry import carry_out
from t2n_hf.hf.dispatch.module_load import ModuleLoad
from t2n_hf.hf.hooks import leases_of
from t2n_hf.hf.placement.device_map import Placement
from t2n_hf.hf.placement.preflight import preflight
from t2n_hf.tensor.contents import MemoryContent, SpillContent
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly


def test_the_users_map_is_not_changed():
    asked = {"model.layers.0": "disk", "": "cpu"}
    placement = Placement()
    assert placement.take(asked) == {"model.layers.0": "cpu", "": "cpu"}
    assert asked == {"model.layers.0": "disk", "": "cpu"}


def test_the_longest_name_decides():
    placement = Placement()
    placement.take({"model.layers.1": "disk", "model.layers.1.mlp": "cpu", "": "cpu"})
    assert placement.on_disk("model.layers.1.self_attn.q_proj.weight")
    assert not placement.on_disk("model.layers.1.mlp.up_proj.weight")
    assert not placement.on_disk("model.layers.10.self_attn.q_proj.weight")


def test_an_accelerator_computes_when_there_is_one():
    placement = Placement()
    assert placement.take({"a": "disk", "b": 0, "c": "cpu"}) == {"a": "cpu", "b": "cpu", "c": "cpu"}
    assert placement.execution_device == 0
    placement.take({"": "disk"})
    assert placement.execution_device == "cpu"
    placement.take({"a": torch.device("cpu"), "b": "disk"})
    assert placement.execution_device == "cpu"


def test_a_tied_weight_is_on_disk_only_when_all_its_names_are():
    placement = Placement()
    placement.tie(dict.fromkeys(("embed.weight", "head.weight"), ("embed.weight", "head.weight")))
    placement.take({"embed": "disk", "head": "cpu"})
    assert not placement.on_disk("embed.weight")
    assert placement.true_map() == {"embed": "cpu", "head": "cpu"}
    placement.take({"": "disk"})
    assert placement.on_disk("embed.weight")
    assert placement.on_disk("head.weight")
    assert placement.true_map() == {"": "disk"}


def test_without_a_map_nothing_is_on_disk():
    placement = Placement()
    assert not placement.on_disk("anything.weight")
    assert not placement.uses_disk


def test_of_several_tied_names_the_one_nearest_to_where_it_computes_decides():
    placement = Placement()
    placement.tie(dict.fromkeys(("a.weight", "b.weight"), ("a.weight", "b.weight")))
    placement.take({"a": "disk", "b": "cpu", "c": "meta"})
    assert placement.where("a.weight") == "cpu"
    assert placement.in_ram("a.weight")
    placement.take({"a": "cpu", "b": "meta"})
    assert placement.where("a.weight") == "meta"
    assert placement.device_of("a.weight") == torch.device("meta")
    placement.take({"a": "disk", "c": "cpu"})  # b is not in the map: it follows a
    assert placement.on_disk("b.weight")


def test_what_no_map_names_is_on_the_cpu():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict({"c": nn.Linear(2, 2), "d": nn.ReLU()})})
    placement = Placement()
    placement.take({"a": "disk"})
    placement.complete(model)
    assert placement.asked == {"a": "disk", "b.c": "cpu"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x, *, aside=None):
        for layer in self.layers:
            x = layer(x)
        return {"x": x * self.scale, "aside": aside}


def test_a_model_of_an_accelerator_has_its_weights_there_in_memory_and_on_disk():
    """The device that computes without a value is the nearest to an accelerator that every machine has."""
    model = Net()
    load = ModuleLoad(model=model, config=T2NConfig(weights="q4_0"), placement=Placement())
    load.placement.take({"": "meta", "layers.1": "cpu", "layers.2": "disk"})
    load.placement.limits = {"meta": 30_000, "cpu": 1 << 30}
    needs = load.needs()
    report = preflight(needs, load.placement)
    carry_out(load, report, skip_keys="aside", force_hooks=False)
    first, second, third, last = model.layers
    assert first.weight.device == last.weight.device == model.scale.device == torch.device("meta")
    assert type(second.weight.source.content) is MemoryContent
    assert type(second.weight.source.content.read(torch.device("cpu"))) is QTensorTractScaleOnly
    assert type(third.weight.source.content) is SpillContent
    assert {second.weight.target_device, third.weight.target_device} == {torch.device("meta")}
    assert list(leases_of(model).pools) == [torch.device("meta")]
    packed = 64 * 64 // 32 * 18
    (row,) = report.devices
    assert (row.device, row.at_once, report.waiting, report.spilled) == ("meta", packed, packed, packed)
    # The last layer stays float, as transformers leaves it; then vectors and the buffer.
    assert row.resident == packed + 64 * 64 * 4 + 4 * 64 * 4 + 64 * 4
    assert row.budget == 30_000 - row.resident
    load.placement.limits = {"cpu": packed - 1}
    with pytest.raises(BudgetError, match=f"fewer than what waits there for meta .{packed}."):
        preflight(needs, load.placement)
    out = model(torch.ones(2, 64, device="meta"), aside=torch.ones(1))
    assert out["x"].device == torch.device("meta")
    assert out["aside"].device == torch.device("cpu")
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    with pytest.raises((NotImplementedError, RuntimeError)):  # its values cannot come back from there
        model(torch.ones(2, 64))
    assert seen == [torch.device("meta")]


def test_one_accelerator_is_one_place_however_it_is_named():
    placement = Placement()
    for device_map in ({"a": 0, "b": "cuda:0", "c": torch.device("cuda")}, {"": 1}):
        assert placement.take(device_map) == device_map
        assert not placement.is_split
    placement.take({"a": 0, "b": "cuda:1"})
    assert placement.is_split
