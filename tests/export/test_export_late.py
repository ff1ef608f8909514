"""An export of a folder quantizes each matrix while it is written: once, into the same bytes, with the same errors."""

import errno
import gc
import hashlib
from pathlib import Path

import models
import pytest
from safetensors.torch import load_file, save_file

from t2n_hf.errors import ConfigError, QuantizationError, StorageError
from t2n_hf.export import export_nnef, origin, weights
from t2n_hf.hf.late import LateContent
from t2n_hf.hf.loading import load_checkpoint
from t2n_hf.store.spill import Spill
from t2n_hf.tensor import QTensorTractScaleOnly


def damaged(folder, *names):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in names:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("count", [1, 3])
def test_bad_values_are_refused_in_the_same_words_when_they_are_read(count, tmp_path):
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)] + ["model.layers.0.mlp.down_proj.weight"]
    folder = damaged(models.saved(models.m2(), tmp_path), *names[:count])
    with pytest.raises(QuantizationError) as early:
        load_checkpoint(folder, weights="q4_0")
    with pytest.raises(QuantizationError) as late:
        export_nnef(folder, tmp_path / "out", weights="q4_0", check=False)
    assert str(late.value) == str(early.value)
    assert all(name in str(late.value) for name in names[:count])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"weights": "q4_0"}, {"dtype": "f16"}, {}], ids=["late", "f16", "plain"])
def test_all_weights_with_bad_values_are_named_once_whatever_they_are_written_as(options, tmp_path):
    matrices = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    names = ["model.embed_tokens.weight", *matrices]
    folder = damaged(models.saved(models.m2(), tmp_path), *names)
    norm = "model.layers.1.input_layernorm.weight"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[norm][3] = 1e6 if "dtype" in options else float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(QuantizationError) as refused:
        export_nnef(folder, tmp_path / "out", check=False, **options)
    text = str(refused.value)
    assert {name: text.count(name) for name in (*names, norm)} == dict.fromkeys((*names, norm), 1)
    assert "And 3 more" in text
    assert sorted(path.name for path in tmp_path.iterdir() if path != folder) == []


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("make", [models.m1, models.m4, models.m6], ids=lambda make: make.__name__)
def test_an_export_is_byte_for_byte_that_of_a_model_quantized_while_loading(make, tmp_path):
    folder = models.saved(make(), tmp_path)
    options = {"weights": "q4_0", "embeddings": "q4_0"}
    report = export_nnef(folder, tmp_path / "late", check=False, **options)
    wanted = export_nnef(load_checkpoint(folder, **options), tmp_path / "early", check=False)
    assert hashes(tmp_path / "late") == hashes(tmp_path / "early")
    assert (report.formats, report.dense) == (wanted.formats, wanted.dense)


@pytest.mark.tract
def test_a_full_spill_says_the_option_that_names_another_folder_for_it(tmp_path, monkeypatch):
    folder = models.saved(models.m2(), tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("t2n_hf.store.spill.os.pwrite", full)
        with pytest.raises(StorageError, match=r"cannot spill .* bytes in .*name another folder \(spill_dir"):
            export_nnef(folder, tmp_path / "out", weights="q4_0")
    assert not (tmp_path / "out").exists()
    spill, used = tmp_path / "spill", []
    put = Spill.put
    monkeypatch.setattr(Spill, "put", lambda self, value: used.append(self._where) or put(self, value))
    export_nnef(folder, tmp_path / "out", weights="q4_0", spill_dir=spill)
    assert set(used) == {str(spill)}
    assert not list(spill.iterdir())


def test_a_loaded_model_is_not_told_where_to_spill(tmp_path):
    with pytest.raises(ConfigError, match="spill_dir: for loading a checkpoint"):
        export_nnef(models.m1(), tmp_path / "out", spill_dir=tmp_path, check=False)


def test_an_export_quantizes_each_weight_once(tmp_path, monkeypatch):
    folder, read = models.saved(models.m1(), tmp_path), []
    groups = LateContent._row_groups
    monkeypatch.setattr(LateContent, "_row_groups", lambda self, size: read.append(self._name) or groups(self, size))
    export_nnef(folder, tmp_path / "plain", check=False, weights="q4_0", embeddings="q4_0")
    assert len(read) == len(set(read)) == 15


def test_a_large_matrix_is_never_packed_as_a_whole(tmp_path, monkeypatch):
    folder, sizes = models.saved(models.m1(), tmp_path), []
    monkeypatch.setattr(weights, "_GROUP_NBYTES", 8 << 10)
    quantize = QTensorTractScaleOnly.quantize.__func__

    def measured(cls, tensor, **options):
        sizes.append(tensor.nbytes)
        return quantize(cls, tensor, **options)

    monkeypatch.setattr(QTensorTractScaleOnly, "quantize", classmethod(measured))
    options = {"weights": "q4_0", "embeddings": "q4_0"}
    export_nnef(folder, tmp_path / "late", check=False, **options)
    assert max(sizes) <= 8 << 10
    monkeypatch.undo()
    export_nnef(load_checkpoint(folder, **options), tmp_path / "early", check=False)
    assert hashes(tmp_path / "late") == hashes(tmp_path / "early")


@pytest.mark.tract
def test_a_checked_export_quantizes_each_weight_once_and_compares_with_what_was_kept(tmp_path, monkeypatch):
    folder, read = models.saved(models.m1(), tmp_path), []
    groups = LateContent._row_groups
    monkeypatch.setattr(LateContent, "_row_groups", lambda self, size: read.append(self._name) or groups(self, size))
    report = export_nnef(folder, tmp_path / "checked", weights="q4_0", embeddings="q4_0")
    assert report.check == "passed"
    assert len(read) == len(set(read)) == 15


def test_no_garbage_is_looked_for_while_an_export_loads_and_it_is_looked_for_again_afterwards(tmp_path, monkeypatch):
    folder, seen = models.saved(models.m1(), tmp_path), []
    load = origin.load_checkpoint
    monkeypatch.setattr(origin, "load_checkpoint", lambda *a, **o: seen.append(gc.isenabled()) or load(*a, **o))
    export_nnef(folder, tmp_path / "out", check=False)
    assert seen == [False]
    assert gc.isenabled()
