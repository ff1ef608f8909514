"""What plan_placement says is what a load then does; nothing of the weights is read for it."""

from dataclasses import replace

import models
import pytest
import torch
from accelerate import init_empty_weights
from torch import nn

from t2n_hf import T2NConfig, plan_placement
from t2n_hf.errors import BudgetError, CheckpointNotFoundError, ConfigError, StorageError
from t2n_hf.hf.hooks import leases_of, offloaded_parameters
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.hf.placement import preflight
from t2n_hf.hf.weights import held_nbytes
from t2n_hf.tensor.offload import OffloadedTensor

LIMIT = {"cpu": 170_000}
CASES = [
    ("m1", T2NConfig(), "auto"),
    ("m2", T2NConfig("none"), "auto"),
    ("m2", T2NConfig(compute="fast"), "auto"),
    ("m2", T2NConfig("none", max_length=64), {"": "disk"}),
    ("m4", T2NConfig(), {"": "cpu", "model.layers.1": "disk"}),
    ("m10", T2NConfig(), "disk"),
]


@pytest.mark.parametrize(("name", "config", "device_map"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
def test_a_folder_is_loaded_as_planned(name, config, device_map, tmp_path):
    folder = models.saved(getattr(models, name)(), tmp_path)
    limits = LIMIT if name != "m10" else None
    limits = {"m1": {"cpu": 100_000}, "m4": {"cpu": 400_000}}.get(name, limits)
    report = plan_placement(folder, config, device_map, limits)
    model = load_checkpoint(folder, config=config, device_map=device_map, max_memory=limits)
    (row,) = report.devices
    on_disk = set(offloaded_parameters(model))
    assert {n for n, p in model.named_parameters() if report.where[n] == "disk" and p.dim() > 1} == on_disk
    held = sum(held_nbytes(p) for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert row.resident == held
    assert row.budget == leases_of(model).pool.max_cached_bytes
    spilled = {n: p for n, p in model.named_parameters() if n in on_disk and not p.source_range}
    packed_in_place = 0
    assert report.spilled + packed_in_place == sum(p.nbytes_loaded for p in spilled.values())
    assert dict(report.device_map) == model.hf_device_map
    assert row.limit == (limits or {}).get("cpu")
    if limits:
        assert report.ram <= limits["cpu"]


def test_a_packed_folder_is_planned_by_its_own_options(tmp_path):
    packed = load_checkpoint(models.saved(models.m2(), tmp_path), weights="q4_0", device_map=None)
    folder = models.saved(packed, tmp_path)
    report = plan_placement(folder, device_map="disk")
    assert report.spilled == 0
    assert report.read_in_place == sum(held_nbytes(p) for p in packed.parameters() if p.dim() > 1)
    model = load_checkpoint(folder, device_map="disk", max_memory={"cpu": "120KB"})
    assert report.devices[0].resident + leases_of(model).pool.max_cached_bytes == 120_000


def test_no_weight_is_read(tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    expected = plan_placement(folder, T2NConfig(), "auto", LIMIT)
    file = folder / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little") + 8
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(header)  # the values are gone, a hole of their size is there
        stream.truncate(size)
    found = plan_placement(folder, T2NConfig(), "auto", LIMIT)
    assert replace(found, memory=0, disk_free=0) == replace(expected, memory=0, disk_free=0)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError):
        plan_placement(folder)


def test_any_module_can_be_planned_for(tmp_path):
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    report = plan_placement(model, T2NConfig("none"), "auto", {"cpu": 133_000})
    assert report.devices[0].resident == 132_352
    assert report.device_map == {"": "cpu"}
    report = plan_placement(model, T2NConfig("none"), "auto", {"cpu": 132_351})
    assert report.devices[0].resident == (256 + 64) * 4
    assert report.device_map == {"": "disk"}  # both take turns in a budget of nearly all
    assert report.devices[0].budget == 132_351 - (256 + 64) * 4
    with pytest.raises(BudgetError, match="The least that works"):
        plan_placement(model, T2NConfig("none"), "auto", {"cpu": 60_000})
    text = str(plan_placement(model, device_map="cpu"))
    assert text.splitlines()[0].split() == ["device", "resident", "cache", "offloaded", "at", "once", "limit"]


def test_a_load_that_the_disk_has_no_room_for_is_refused_before_it_begins(tmp_path, monkeypatch):
    folder = models.saved(models.m2(), tmp_path)
    monkeypatch.setattr(preflight, "free_disk_nbytes", lambda folder: 10_000)
    with pytest.raises(StorageError, match=r"bytes are to be written to .*spill_dir"):
        plan_placement(folder, T2NConfig(spill_dir=tmp_path / "spill"), "disk")
    assert not (tmp_path / "spill").exists()
    with pytest.raises(StorageError, match="which has 10000 free"):
        load_checkpoint(folder, weights="q4_0")
    assert plan_placement(folder, T2NConfig("none"), "disk").spilled == 0  # read where it is


def test_a_load_that_memory_has_no_room_for_is_refused_before_it_begins(tmp_path, monkeypatch):
    folder = models.saved(models.m2(), tmp_path)
    monkeypatch.setattr(preflight, "reachable_memory_nbytes", lambda: 30_000)
    with pytest.raises(BudgetError, match="this machine has 30000"):
        plan_placement(folder, T2NConfig(), "cpu")
    plan_placement(folder, T2NConfig("none"), "cpu")  # pages of the file, which the system can take back
    plan_placement(folder, T2NConfig(), "disk")


def test_a_folder_that_cannot_be_written_is_refused_before_loading(tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="cannot make a spill file in"):
        plan_placement(folder, T2NConfig(spill_dir=tmp_path / "file" / "spill"), "disk")


def test_options_that_cannot_be_are_refused(tmp_path):
    folder = models.saved(models.m2(), tmp_path)
    with pytest.raises(ConfigError, match="max_length=0"):
        plan_placement(folder, max_length=0)
    with pytest.raises(ConfigError, match="no device"):
        plan_placement(folder, device_map="nowhere")


def test_limits_hold_beside_a_given_map(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    model = load_checkpoint(folder, device_map={"": "disk"}, max_memory={"cpu": 90_000})
    held = sum(held_nbytes(p) for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert leases_of(model).pool.max_cached_bytes == 90_000 - held
    with torch.no_grad():
        assert torch.equal(model(models.prompt()).logits, source(models.prompt()).logits)
    assert isinstance(model.lm_head.weight, OffloadedTensor)
    with pytest.raises(BudgetError, match=r"lm_head needs at once \(65536\)"):
        load_checkpoint(folder, device_map={"": "disk"}, max_memory={"cpu": 60_000})
