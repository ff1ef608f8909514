"""Device maps for any module: the same numbers as PyTorch, the same meaning as accelerate, nothing half done."""

import copy
import gc
import os
import re

import models
import pytest
import torch
from accelerate import init_empty_weights
from accelerate.utils import infer_auto_device_map
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn import functional as F

from t2n_hf import T2NConfig, dispatch_model, load_checkpoint_and_dispatch, materialize
from t2n_hf.errors import (
    BudgetError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    QuantizationError,
    UnsupportedOpError,
)
from t2n_hf.hf.hooks import leases_of, offloaded_parameters
from t2n_hf.hf.placement.infer import infer_map
from t2n_hf.hf.placement.needs import Weight, needs_of
from t2n_hf.hf.plan import tied_groups
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(64), persistent=False)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x)))) * self.scale * self.mask


class Net(nn.Module):
    """Tied weights, buffers, modules without parameters, and a weight that is used without its module's forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused_forward = nn.Linear(64, 64)
        self.gain = nn.Parameter(torch.randn(64, 64))
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.drop(self.table(ids))
        for block in self.blocks:
            x = block(x)
        x = x @ self.unused_forward.weight.T + self.unused_forward.bias
        return self.head(x @ self.gain)


def net(seed=0):
    torch.manual_seed(seed)
    return Net().eval()


def empty():
    with init_empty_weights():
        model = Net().eval()
    model.head.weight = model.table.weight
    return model


IDS = torch.arange(12).reshape(2, 6)
MAPS = {
    "disk": "disk",
    "all on disk": {"": "disk"},
    "cpu": "cpu",
    "mixed": {"": "cpu", "blocks.1": "disk", "gain": "disk", "unused_forward": "disk"},
    "tied apart": {"table": "disk", "head": "cpu", "blocks": "disk", "unused_forward": "cpu", "gain": "cpu"},
    "auto": "auto",
}


def run(model):
    with torch.no_grad():
        return model(IDS)


@pytest.fixture
def checkpoint(tmp_path):
    save_model(net(), str(tmp_path / "net.safetensors"))
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("make", [empty, lambda: net(9)], ids=["empty", "with other values"])
def test_a_module_computes_what_pytorch_computes(device_map, make, checkpoint):
    model = load_checkpoint_and_dispatch(make(), checkpoint, device_map=device_map)
    assert torch.equal(run(model), run(net()))
    assert model.head.weight is model.table.weight
    assert all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert leases_of(model) is None or leases_of(model).pool.lease_count == 0
    plain = materialize(model)
    assert torch.equal(run(plain), run(net()))
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    assert "to" not in vars(plain)


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_a_module_with_values_is_dispatched_as_it_is(device_map):
    model = dispatch_model(net(), device_map)
    assert torch.equal(run(model), run(net()))
    on_disk = set(offloaded_parameters(model))
    if device_map in ("disk", {"": "disk"}):
        assert on_disk == {name for name, p in net().named_parameters() if p.dim() > 1}
    if device_map == MAPS["mixed"]:
        assert on_disk == {"blocks.1.up.weight", "blocks.1.down.weight", "gain", "unused_forward.weight"}


def test_the_map_is_what_was_asked_for_with_ties_set_right(checkpoint):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map=MAPS["tied apart"])
    assert model.hf_device_map == {**MAPS["tied apart"], "table": "cpu"}
    assert load_checkpoint_and_dispatch(empty(), checkpoint, device_map="cpu").hf_device_map == {"": "cpu"}
    assert not hasattr(load_checkpoint_and_dispatch(empty(), checkpoint), "hf_device_map")


def test_limits_decide_and_hold(checkpoint):
    total = sum(p.nbytes for p in net().parameters())
    with pytest.raises(BudgetError, match="The least that works") as refused:
        load_checkpoint_and_dispatch(empty(), checkpoint, "auto", max_memory={"cpu": 1})
    least = int(re.search(r"with this map is (\d+)", str(refused.value))[1])
    for limit in (least, least + 20_000, "120KB", total * 2):
        model = load_checkpoint_and_dispatch(empty(), checkpoint, "auto", max_memory={"cpu": limit})
        assert torch.equal(run(model), run(net()))
        nbytes = int(str(limit).replace("KB", "000"))
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not isinstance(t, OffloadedTensor))
        pool = leases_of(model).pool if leases_of(model) else None
        assert held + (pool.max_cached_bytes if pool else 0) <= nbytes
    assert pool is None
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"}, max_memory={"cpu": 80_000})
    assert 0 < leases_of(model).pool.max_cached_bytes < 80_000
    with pytest.raises(BudgetError, match="what the device map puts there"):
        load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu"}, max_memory={"cpu": 80_000})


def test_with_two_accelerators_the_map_is_accelerates():
    model = nn.Sequential(*(Block() for _ in range(6)))
    needs = needs_of(model, lambda names, p: Weight(names=names, nbytes=p.nbytes), tied_groups(model))
    one = sum(item.nbytes for item in needs.items) // 6
    # accelerate sets aside the largest layer on each accelerator also when nothing is offloaded: it gets that on top.
    theirs = infer_auto_device_map(model, {0: 4 * one, 1: 4 * one, "cpu": 10 * one}, no_split_module_classes=["Block"])
    ours = infer_map(model, needs, {0: 3 * one, 1: 3 * one, "cpu": 10 * one}, no_split={"Block"})
    assert ours == dict(theirs)


def test_quantizing_on_the_way(checkpoint):
    torch.manual_seed(0)
    config = T2NConfig(modules_to_not_convert=[])
    kept = load_checkpoint_and_dispatch(empty(), checkpoint, "cpu", quantization_config=config)
    on_disk = load_checkpoint_and_dispatch(empty(), checkpoint, "disk", quantization_config=config)
    dispatched = dispatch_model(net(), {"": "disk"}, quantization_config=config)
    assert type(kept.blocks[0].up.weight) is QTensorTractScaleOnly
    assert on_disk.blocks[0].up.weight.inner_class is QTensorTractScaleOnly
    assert torch.equal(run(kept), run(on_disk))
    assert torch.equal(run(kept), run(dispatched))
    expected = net()
    for name, parameter in kept.named_parameters():
        if isinstance(parameter, QTensorTractScaleOnly):
            expected.get_parameter(name).data.copy_(parameter.to_base_tensor())
    torch.testing.assert_close(run(kept), run(expected), atol=1e-5, rtol=1e-5)
    assert kept.t2n_report().by_format()["q4_0"][0] == 7
    default = load_checkpoint_and_dispatch(empty(), checkpoint, "cpu", quantization_config=T2NConfig())
    assert type(default.head.weight) is nn.Parameter  # tied, and the last one


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.float16"])
@pytest.mark.parametrize("device_map", [None, "cpu", "disk"])
def test_float_weights_become_what_is_asked_for_and_others_stay(dtype, device_map, checkpoint):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map, dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert model.blocks[0].steps.dtype == torch.int64
    assert torch.equal(run(model), run(net().to(wanted)))


def sharded(tmp_path, drop=(), add=()):
    state = {k: v for k, v in net().state_dict().items() if k != "head.weight" and k not in drop}
    state.update(dict(add))
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: state[k].contiguous() for k in keys}, str(tmp_path / file))
    weight_map = {k: file for file, keys in parts.items() for k in keys}
    (tmp_path / "model.safetensors.index.json").write_text(str({"weight_map": weight_map}).replace("'", '"'))
    return tmp_path


@pytest.mark.parametrize("strict", [True, False])
def test_shards_are_read_by_their_index_or_their_folder(strict, tmp_path):
    folder = sharded(tmp_path)
    for path in (folder, folder / "model.safetensors.index.json", str(folder)):
        assert torch.equal(run(load_checkpoint_and_dispatch(empty(), path, "disk", strict=strict)), run(net()))


def state_of(model):
    return {name: (id(t), t.is_meta) for name, t in (*model.named_parameters(), *model.named_buffers())}


def test_names_that_differ_are_as_accelerate_has_them(tmp_path):
    folder = sharded(tmp_path, drop=["gain"], add={"extra": torch.ones(2)}.items())
    full, before = net(3), copy.deepcopy(net(3).gain)
    with pytest.warns(UserWarning, match="has extra, which Net lacks"):
        load_checkpoint_and_dispatch(full, folder, "cpu")
    assert torch.equal(full.gain, before)
    assert torch.equal(full.table.weight, net().table.weight)
    for make in (empty, lambda: net(3)):
        model = make()
        state = state_of(model)
        with pytest.raises(FormatError, match="no values for gain and has extra, which the model lacks"):
            load_checkpoint_and_dispatch(model, folder, "cpu", strict=True)
        assert state_of(model) == state
    model = empty()
    with (
        pytest.warns(UserWarning, match="extra"),
        pytest.raises(FormatError, match="no values for gain, which Net has"),
    ):
        load_checkpoint_and_dispatch(model, folder, "cpu")
    assert all(p.is_meta for p in model.parameters())


def test_shapes_that_differ_are_refused_and_nothing_changes(tmp_path):
    folder = sharded(tmp_path, drop=["gain"], add={"gain": torch.ones(64, 32)}.items())
    model = net(3)
    state = state_of(model)
    with pytest.raises(FormatError, match=r"gain has shape \(64, 32\), the model has \(64, 64\)"):
        load_checkpoint_and_dispatch(model, folder, "disk")
    assert state_of(model) == state
    assert leases_of(model) is None


def test_a_load_that_fails_in_the_middle_leaves_the_module_as_it_was(tmp_path):
    bad = torch.ones(64, 64)
    bad[3, 4] = float("nan")
    folder = sharded(tmp_path, drop=["blocks.2.up.weight"], add={"blocks.2.up.weight": bad.repeat(2, 1)}.items())
    model = net(3)
    state, expected = state_of(model), run(model)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(QuantizationError, match=r"blocks\.2\.up\.weight"):
        load_checkpoint_and_dispatch(model, folder, "disk", quantization_config=T2NConfig())
    assert state_of(model) == state
    assert torch.equal(run(model), expected)
    assert set(vars(model)) == set(vars(net()))
    assert not model._forward_pre_hooks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_pickled_checkpoints_are_refused_with_what_to_do(name, tmp_path):
    (tmp_path / name).write_bytes(b"{}")
    for path in (tmp_path / name, tmp_path):
        if path == tmp_path and name.endswith("json"):
            continue
        with pytest.raises(CheckpointNotFoundError, match=r"pickl.*|unpickl.*convert"):
            load_checkpoint_and_dispatch(empty(), path, "cpu")


def test_maps_and_arguments_without_a_meaning_are_refused(checkpoint):
    for options, said in (
        ({"device_map": {"blocks": "cpu"}}, "does not give any device for .*gain"),
        ({"device_map": {"": "floppy"}}, "'floppy' is no device"),
        ({"device_map": "cpu", "max_memory": {"cpu": "much"}}, "max_memory"),
        ({"device_map": "cpu", "max_memory": "1GB"}, "max_memory='1GB'; expected bytes by device"),
        ({"device_map": "cpu", "dtype": "float12"}, "dtype='float12'"),
        ({"offload_buffers": True}, "offload_buffers=True has no meaning"),
        ({"full_state_dict": False}, "full_state_dict=False has no meaning"),
        ({"broadcast_from_rank0": True}, "broadcast_from_rank0=True has no meaning"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_checkpoint_and_dispatch(empty(), checkpoint, **options)
    model = load_checkpoint_and_dispatch(empty(), checkpoint, "disk")
    with pytest.raises(ConfigError, match="has a device map already"):
        dispatch_model(model, {"": "cpu"})


def test_arguments_that_are_not_needed_are_taken(checkpoint):
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "disk"}, None, ["Block"], "/tmp", False, None, True, "ids", ["Block"], True, True
    )
    assert torch.equal(run(model), run(net()))


def test_a_module_on_disk_is_not_moved_away(checkpoint):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, "disk")
    assert model.to("cpu") is model
    assert model.cpu() is model
    for move in (lambda: model.to("cuda"), lambda: model.to(torch.device("cuda:1")), model.cuda):
        with pytest.raises(UnsupportedOpError, match=r"cannot be moved to cuda.*materialize\(model\)"):
            move()
    assert torch.equal(run(model), run(net()))
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied), run(net()))
    with pytest.raises(UnsupportedOpError):
        copied.to("cuda")


def test_weights_that_are_on_disk_already_are_read_there(checkpoint, tmp_path):
    names = [name for name in net().state_dict() if name != "table.weight"]  # safetensors keeps one of two
    index = {name: {"safetensors_file": str(checkpoint), "weight_name": name} for name in names}
    model = dispatch_model(empty(), {"": "disk"}, offload_index=index)
    assert torch.equal(run(model), run(net()))
    assert model.gain.source_range.file.path == checkpoint
    model = dispatch_model(empty(), {"": "disk"}, state_dict=net().state_dict(), offload_dir=tmp_path / "spill")
    assert torch.equal(run(model), run(net()))
    assert not list((tmp_path / "spill").iterdir())
    with pytest.raises(ConfigError, match="gain is in a"):
        dispatch_model(empty(), {"": "disk"}, offload_index={"gain": {"dtype": "float32", "shape": [64, 64]}})
    with pytest.raises(FormatError, match="holds no values for"):
        dispatch_model(empty(), {"": "disk"})


@pytest.mark.parametrize("weights", ["q4_0", "none"])
@pytest.mark.parametrize("device_map", ["disk", "auto", {"": "cpu", "model.layers.1": "disk"}], ids=str)
def test_models_of_transformers_are_loaded_as_from_pretrained_does(weights, device_map, tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    with init_empty_weights(include_buffers=False):
        model = type(source)(source.config).eval()
    model.tie_weights()
    config = T2NConfig(weights)
    model = load_checkpoint_and_dispatch(model, folder, device_map, quantization_config=config)
    expected = type(source).from_pretrained(folder, quantization_config=config, dtype="auto")
    ids = models.prompt()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
    assert model.device == torch.device("cpu")
    assert model.get_memory_footprint() <= expected.get_memory_footprint()
    copied = materialize(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    assert not hasattr(copied, "hf_quantizer")
    saved = [models.saved(m, tmp_path) for m in (model, expected)]
    assert (saved[0] / "model.safetensors").read_bytes() == (saved[1] / "model.safetensors").read_bytes()
    if weights == "q4_0":
        with init_empty_weights(include_buffers=False):
            again = type(source)(source.config).eval()
        again.tie_weights()
        again = load_checkpoint_and_dispatch(again, saved[0], device_map)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, expected(ids).logits)
        kinds = {p.inner_class if isinstance(p, OffloadedTensor) else type(p) for p in again.parameters()}
        assert QTensorTractScaleOnly in kinds
