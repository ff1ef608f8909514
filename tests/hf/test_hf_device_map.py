import torch

from t2n_hf.hf.device_map import Placement


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
