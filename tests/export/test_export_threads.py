"""Exports that are asked for at once, from several threads, of one model too."""

from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import torch

from t2n_hf import export_nnef

pytestmark = pytest.mark.tract


def test_exports_of_one_model_in_several_threads_are_done_one_after_the_other(tmp_path):
    model = models.m1(num_hidden_layers=1)
    before = dict(model.named_parameters())
    kept = {name: value.clone() for name, value in before.items()}
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(export_nnef, model, tmp_path / str(number), check=False) for number in range(3)]
        found = [export.result() for export in asked]
    texts = {(report.folder / "model.nnef.tgz").read_bytes() for report in found}
    assert len(texts) == 1
    for name, value in model.named_parameters():
        assert value is before[name]
        assert torch.equal(value, kept[name])
