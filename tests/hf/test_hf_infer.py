"""Maps made of limits alone, held to their promises on many random modules. No weight has a value."""

import random

import pytest
import torch
from accelerate.utils import get_balanced_memory
from torch import nn

from t2n_hf.hf.placement.infer import balanced, infer_map, largest_need, window_beside
from t2n_hf.hf.placement.needs import AtOnce, Weight, needs_of, stays_in_memory
from t2n_hf.hf.plan import tied_groups


class Block(nn.Module):
    def __init__(self, wide, biased):
        super().__init__()
        self.up = nn.Linear(64, wide, bias=biased)
        self.down = nn.Linear(wide, 64, bias=biased)
        self.gain = nn.Parameter(torch.ones(64, 64)) if biased else None


class Net(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.table = nn.Embedding(draw.choice([100, 1000]), 64)
        self.blocks = nn.ModuleList(
            Block(draw.choice([64, 128, 512]), draw.random() < 0.5) for _ in range(draw.randint(1, 8))
        )
        self.head = nn.Linear(64, self.table.num_embeddings, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(64))


def described(names, parameter):
    parts = parameter.shape[0] if parameter.dim() > 1 else 1
    return Weight(names=names, nbytes=parameter.nbytes, parts=parts, kept=stays_in_memory(parameter))


def made(seed):
    with torch.device("meta"):
        model = Net(random.Random(seed))
    cache = (1000,) * len(model.blocks) if seed % 2 else ()
    return model, needs_of(model, described, tied_groups(model), cache)


def places(needs, device_map):
    found = {}
    for item in needs.items:
        path = item.path
        while path and path not in device_map:
            path = path.rpartition(".")[0]
        found[item.path] = device_map[path]
    return found


def on_main(needs, found, main):
    """What the main device has to hold at least, counted anew: (stays there, takes turns, names of that)."""
    home = {}
    for item in needs.items:
        for weight in item.weights:
            home.setdefault(weight.name, set()).add(found[item.path])
    turns = {name for name, where in home.items() if where <= {"disk", *({"cpu"} - {main})}}
    stays = sum(needs.cache.get(i.path, 0) + i.buffers for i in needs.items if found[i.path] in (main, "disk", "cpu"))
    for weight in needs.weights:
        if (weight.kept and home[weight.name] & {main, "disk", "cpu"}) or (
            weight.name not in turns and main in home[weight.name]
        ):
            stays += weight.nbytes
    return stays, largest_need(needs.at_once(turns)).nbytes, turns


@pytest.mark.parametrize("seed", range(30))
def test_what_stays_and_the_largest_turn_fit_and_more_memory_keeps_more(seed):
    model, needs = made(seed)
    stays, turn, _ = on_main(needs, dict.fromkeys((i.path for i in needs.items), "disk"), "cpu")
    least, total = stays + turn, needs.nbytes + needs.cache_nbytes
    kept = []
    for limit in [least, *(least + (total - least) * i // 7 for i in range(1, 7)), total]:
        found = places(needs, infer_map(model, needs, {"cpu": limit}))
        assert set(found.values()) <= {"cpu", "disk"}
        stays, turn, turns = on_main(needs, found, "cpu")
        assert stays + turn <= limit
        kept.append(stays)
        assert turns or limit >= total
    assert kept == sorted(kept)
    assert set(found.values()) == {"cpu"}
    assert infer_map(model, needs, {"cpu": total}) == {"": "cpu"}
    assert infer_map(model, needs, {"cpu": 0}) == {"": "disk"}


@pytest.mark.parametrize("seed", range(20))
def test_an_accelerator_is_filled_first_then_memory_then_the_disk(seed):
    model, needs = made(seed)
    stays, turn, _ = on_main(needs, dict.fromkeys((i.path for i in needs.items), "disk"), 0)
    limits = {0: stays + turn + needs.nbytes // 3, "cpu": needs.nbytes // 4, "disk": 1 << 40}
    found = places(needs, infer_map(model, needs, limits))
    stays, turn, _ = on_main(needs, found, 0)
    assert stays + turn <= limits[0]
    waiting = sum(i.nbytes - i.kept for i in needs.items if found[i.path] == "cpu")
    assert waiting <= limits["cpu"]
    left = [i for i in needs.items if found[i.path] == "disk" and i.nbytes > i.kept]
    assert all(i.nbytes - i.kept + waiting > limits["cpu"] for i in left[:1])


@pytest.mark.parametrize("seed", range(10))
def test_several_accelerators_keep_whole_blocks(seed):
    model, needs = made(seed)
    limits = {0: needs.nbytes // 2, 1: needs.nbytes // 3, "cpu": needs.nbytes}
    found = places(needs, infer_map(model, needs, limits, no_split={"Block"}))
    for block in range(len(model.blocks)):
        assert len({where for path, where in found.items() if path.startswith(f"blocks.{block}.")}) == 1
    second = [i for i in needs.items if found[i.path] == 1]
    assert sum(i.nbytes + needs.cache.get(i.path, 0) for i in second) <= limits[1]


def test_balanced_limits_are_accelerates_for_equal_blocks():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(8)))
    needs = needs_of(model, described, {})
    size = 256 * 256 * 4
    limits = {0: 100 * size, 1: 100 * size, 2: 100 * size, "cpu": 100 * size}
    for how in ("balanced", "balanced_low_0"):
        theirs = get_balanced_memory(model, dict(limits), low_zero=how == "balanced_low_0")
        ours = balanced(model, needs, limits, (), how)
        assert ours[2] == limits[2]
        if how == "balanced":
            assert [ours[i] // size for i in (0, 1)] == [8 // 3 + 1] * 2  # a third, and a block and a quarter
        else:
            assert ours[0] < size
        assert set(ours) == set(theirs) | {"cpu"}
    assert balanced(model, needs, {0: 5, "cpu": 7}, (), "balanced") == {0: 5, "cpu": 7}


def test_a_module_that_needs_far_more_than_others_is_kept_first_and_a_table_read_by_rows_last():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
            self.head = nn.Linear(64, 1000, bias=False)

    with torch.device("meta"):
        model = Model()
    needs = needs_of(model, described, {})
    limit = model.head.weight.nbytes + 6 * 64 * 64 * 4
    found = places(needs, infer_map(model, needs, {"cpu": limit}))
    assert found["head"] == "cpu"
    assert found["table"] == "disk"
    assert sum(where == "cpu" for path, where in found.items() if "blocks" in path) == 3  # three take turns


def test_a_window_is_room_for_the_next_two_modules_beside_the_largest():
    needs = [AtOnce("a", 10, "a"), AtOnce("b", 30, "b"), AtOnce("c", 20, "c"), AtOnce("d", 5, "d")]
    assert window_beside(needs, None) == 30
    assert window_beside(needs[1:2], None) == 0
    assert window_beside(needs, 0) == 0
    assert window_beside(needs, 7) == 7
    assert window_beside([], None) == 0


def test_what_a_module_uses_itself_counts_while_its_parts_run():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(64, 64))
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False)

    with torch.device("meta"):
        model = Outer()
    needs = needs_of(model, described, {})
    found = {need.module: need.nbytes for need in needs.at_once({w.name for w in needs.weights})}
    one = 64 * 64 * 4
    assert found == {"": one, "first": 2 * one, "second": 3 * one}
