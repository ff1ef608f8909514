"""What is left when an export fails, is killed, or meets a full disk; and that the same model gives the same bytes."""

import getpass
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import torch
from torch import nn

from t2n_hf.errors import CheckError, FormatError, QuantizationError, StorageError
from t2n_hf.export import export_nnef
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.manifest import ExportManifest

TESTS = Path(__file__).resolve().parent.parent
EXPORT = """
import resource, sys, torch
torch.set_num_threads(1)
from t2n_hf.export import export_nnef
source, out, limit, overwrite = sys.argv[1:]
if limit != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
print("ready", flush=True)
export_nnef(source, out, check=False, overwrite=overwrite == "1")
"""


def files_in(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return models.saved(models.m2(hidden_size=256, intermediate_size=2048, num_hidden_layers=4), folder)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """An export to be overwritten."""
    folder = tmp_path_factory.mktemp("older") / "out"
    export_nnef(models.m1(), folder, check=False)
    return folder


@pytest.fixture(params=["new", "over an older export"])
def place(request, older, tmp_path):
    """(folder to write, what it holds now)."""
    out = tmp_path / "out"
    if request.param == "new":
        return out, None
    subprocess.run(["cp", "-r", str(older), str(out)], check=True)
    return out, files_in(older)


def assert_untouched(place):
    out, before = place
    if before is None:
        assert not out.exists()
    else:
        assert files_in(out) == before


def test_a_weight_with_nan_in_the_last_layer_leaves_what_was_there(place):
    model = models.m1()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(QuantizationError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' holds NaN"):
        export_nnef(model, place[0], check=False, overwrite=True)
    assert_untouched(place)
    assert [path for path in place[0].parent.iterdir() if path != place[0]] == []


@pytest.mark.tract
def test_an_archive_that_fails_its_check_leaves_what_was_there(place):
    with pytest.raises(CheckError, match="nothing was exported"):
        export_nnef(models.m1(), place[0], overwrite=True, tolerance=1e-12)
    assert_untouched(place)


def test_a_full_disk_is_a_clear_error_and_leaves_what_was_there(place, checkpoint):
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(place[0]), str(3 << 20), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "StorageError" in done.stderr
    assert "free some space" in done.stderr
    assert_untouched(place)
    assert [path for path in place[0].parent.iterdir() if path != place[0]] == []


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_export_leaves_what_was_there_and_the_next_one_cleans_up(seed, place, checkpoint):
    out = place[0]
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(checkpoint), str(out), "0", "1"], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    partial = out.with_name(".out.t2n-partial")
    deadline = time.monotonic() + 120
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, 0.05))
    finished = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if not finished and not (out.exists() and files_in(out) != place[1]):
        assert_untouched(place)
    export_nnef(models.m1(), out, check=False, overwrite=True)
    ExportManifest.read(out).verify(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_weight_of_4_gib_is_refused_by_name_before_anything_is_written(tmp_path):
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1).expand(1 << 16, 1 << 14), requires_grad=False)

        def forward(self, x):
            return x @ self.weight

    with pytest.raises(FormatError, match="'weight' takes 4294967296 bytes"):
        export_nnef(Huge(), tmp_path / "out", example_args=(torch.zeros(1, 1 << 16),), check=False)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_checkpoint_is_named_and_nothing_is_written(checkpoint, tmp_path):
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(checkpoint), str(source)], check=True)
    weights = source / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    with pytest.raises(StorageError, match=r"model\.safetensors is truncated"):
        export_nnef(source, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("archive_format", ["tgz", "tar", "dir"])
def test_the_same_model_gives_the_same_bytes_in_any_folder_for_any_user(archive_format, checkpoint, tmp_path):
    first, second = tmp_path / "first" / "out", tmp_path / "second" / "elsewhere"
    copy = tmp_path / "another checkpoint folder"
    subprocess.run(["cp", "-r", str(checkpoint), str(copy)], check=True)
    for source, out, user in ((checkpoint, first, "alice"), (copy, second, "bob")):
        out.parent.mkdir()
        program = EXPORT.replace("check=False", f"check=False, format={archive_format!r}")
        environment = {**os.environ, "USER": user, "LOGNAME": user, "HOME": str(tmp_path / user), "TZ": user}
        command = [sys.executable, "-c", program, str(source), str(out), "0", "0"]
        subprocess.run(command, check=True, env=environment, cwd=out.parent, stdout=subprocess.DEVNULL)
    assert files_in(first) == files_in(second)


def test_an_export_names_no_host_user_path_or_time(checkpoint, tmp_path):
    report = export_nnef(checkpoint, tmp_path / "out", check=False, format="dir")
    text = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    for secret in (str(tmp_path), str(checkpoint), str(Path.home()) + "/", os.getcwd(), sys.executable, sys.argv[0]):
        assert secret.encode() not in text
    for name in (socket.gethostname(), getpass.getuser()):
        if len(name) > 4:
            assert name.encode() not in text
    assert time.strftime("%Y-%m-%d").encode() not in text
    assert ArchiveReader(report.archive).names()
