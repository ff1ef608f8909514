"""Loads that fail, and loads beside each other: an error that says what, and nothing lost or left behind."""

import gc
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading

import models
import pytest
import safetensors.torch
import torch
from transformers import LlamaForCausalLM

from t2n_hf import T2NConfig, load_checkpoint_and_dispatch
from t2n_hf.errors import CheckpointNotFoundError, FormatError, QuantizationError, StorageError
from t2n_hf.hf.hooks import leases_of, offloaded_parameters
from t2n_hf.hf.loading import load_checkpoint

DISK = {"": "disk"}
UP = "model.layers.1.mlp.up_proj.weight"
OTHER = """
import sys, torch
sys.path.insert(0, {tests!r})
import models, t2n_hf
from transformers import AutoModelForCausalLM
config = t2n_hf.T2NConfig(spill_dir={spill!r}, max_resident_bytes=70_000)
model = AutoModelForCausalLM.from_pretrained({folder!r}, quantization_config=config, device_map={{"": "disk"}})
print("loaded", flush=True)
ids = models.prompt()
while True:
    with torch.no_grad():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    print(tokens[0].tolist(), flush=True)
"""


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def greedy(model):
    ids = models.prompt()
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("device_map", [DISK, "auto"], ids=["disk", "auto"])
def test_a_load_that_fails_half_way_leaves_nothing(device_map, tmp_path):
    source = models.m1()
    with torch.no_grad():
        source.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    folder = models.saved(source, tmp_path)
    spill = tmp_path / "spill"
    before, threads = content(folder), set(threading.enumerate())
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    config = T2NConfig(spill_dir=spill)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.down_proj"):
        type(source).from_pretrained(
            folder, quantization_config=config, device_map=device_map, max_memory={"cpu": 90_000}, dtype="auto"
        )
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # it may be ending
        assert not thread.is_alive()
    assert not list(spill.iterdir())
    assert content(folder) == before
    assert config.to_json_string() == T2NConfig(spill_dir=spill).to_json_string()
    plain = type(source).from_pretrained(folder, dtype="auto")  # and transformers is as it was
    assert type(plain.lm_head.weight) is torch.nn.Parameter


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
def test_a_weight_of_a_type_that_is_not_read_is_named(device_map, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(FormatError, match=rf"tensor '{UP}' has dtype F8_E4M3"):
        LlamaForCausalLM.from_pretrained(folder, quantization_config=T2NConfig(), device_map=device_map)


def load(folder, spill, weights="q4_0"):
    config = T2NConfig(weights, spill_dir=spill, max_resident_bytes=70_000)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map=DISK)


def test_two_processes_use_one_folder_at_once_and_one_that_is_killed_leaves_nothing(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    spill = tmp_path / "spill"
    before = content(folder)
    program = OTHER.format(folder=str(folder), spill=str(spill), tests=os.path.dirname(models.__file__))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ours = load(folder, spill)
    expected = greedy(ours)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout.readline() == "loaded\n"
        for _ in range(5):
            assert other.stdout.readline() == f"{expected}\n"
            assert greedy(ours) == expected
            assert greedy(load(folder, spill)) == expected
        other.kill()  # while it generates
    assert other.returncode == -signal.SIGKILL
    assert greedy(ours) == expected
    assert not list(spill.iterdir())
    assert content(folder) == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_a_folder_without_write_permission_is_named(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    spill = tmp_path / "spill"
    spill.mkdir(mode=0o555)
    ours = [path for path in tmp_path.parents if path.is_relative_to(tempfile.gettempdir())][:-1]
    for path in (*folder.iterdir(), folder, tmp_path, *ours):
        path.chmod(path.stat().st_mode | 0o055)
    model = load(folder, spill, "none")  # reads the checkpoint where it is: needs no room
    expected = greedy(model)
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match=f"cannot make a spill file in {spill}: Permission denied"):
            load(folder, spill)
    finally:
        os.seteuid(user)
    assert greedy(model) == expected


def test_a_disk_that_is_full_while_spilling_is_an_error_and_nothing_is_lost(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    spill = tmp_path / "spill"
    before = content(folder)
    kept = load(folder, spill, "none")
    expected = greedy(kept)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # writes beyond fail, as on a full disk
    try:
        with pytest.raises(StorageError, match=f"bytes in {spill}: File too large; .*name another folder in its place"):
            load(folder, spill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert greedy(kept) == expected
    assert content(folder) == before
    assert not list(spill.iterdir())
    assert greedy(load(folder, spill)) == greedy(load_checkpoint(folder, weights="q4_0", device_map=None))


def test_a_write_that_fails_later_loses_neither_the_old_value_nor_the_model(tmp_path, monkeypatch):
    model = load_checkpoint(models.saved(models.m2(), tmp_path))
    expected = greedy(model)
    weight = model.lm_head.weight

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with torch.no_grad(), pytest.raises(StorageError, match="No space left on device"):
            weight.zero_()
    assert greedy(model) == expected
    assert leases_of(model).pool.lease_count == 0


def save_pickled(model, folder):
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, folder / "pytorch_model.bin")  # noqa: TID251 - what older repositories hold
    return folder


@pytest.mark.parametrize("weights", ["q4_0", "none"])
@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
def test_from_pretrained_reads_pickled_weights_as_transformers_does(weights, device_map, tmp_path):
    """transformers unpickles with weights_only; what is on disk goes to a spill, as no range of a file holds it."""
    source = models.m1()
    folder = save_pickled(source, tmp_path / "bin")
    expected = type(source).from_pretrained(
        models.saved(source, tmp_path), quantization_config=T2NConfig(weights), dtype="auto"
    )
    model = type(source).from_pretrained(
        folder, quantization_config=T2NConfig(weights), dtype="auto", device_map=device_map
    )
    assert greedy(model) == greedy(expected)
    assert bool(offloaded_parameters(model)) is (device_map is not None)
    assert all(p.source_range is None for p in offloaded_parameters(model).values())
    for load in (lambda: load_checkpoint(folder), lambda: load_checkpoint_and_dispatch(model, folder, "disk")):
        with pytest.raises(CheckpointNotFoundError, match="unpickling"):
            load()


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil",)


def test_pickled_code_is_not_run(tmp_path):
    source = models.m1()
    folder = save_pickled(source, tmp_path / "bin")
    torch.save({"lm_head.weight": Evil()}, folder / "pytorch_model.bin")  # noqa: TID251
    with pytest.raises(Exception, match=r"(?i)weights.?only|unsupported"):
        type(source).from_pretrained(folder, quantization_config=T2NConfig(), device_map=DISK)
