"""What is left when an export fails."""

import hashlib
import os
import subprocess

import models
import pytest
import torch

from t2n_hf.errors import CheckError, QuantizationError, StorageError
from t2n_hf.export import export_nnef


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


def test_a_truncated_checkpoint_is_named_and_nothing_is_written(checkpoint, tmp_path):
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(checkpoint), str(source)], check=True)
    weights = source / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    with pytest.raises(StorageError, match=r"model\.safetensors is truncated"):
        export_nnef(source, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()
