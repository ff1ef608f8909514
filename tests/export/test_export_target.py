"""`target`: an archive for an older tract has nothing newer in it, or is refused with all that is."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from t2n_hf.errors import ConfigError, EmitError
from t2n_hf.export import export_nnef
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tract.runner import TractRunner

WHEELS = Path(__file__).resolve().parents[2] / ".cache/tract-wheels"


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(torch.cumsum(x, 2), 3, stride=2, padding=1)


class Samples(nn.Module):
    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


IMAGE = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.tract
@pytest.mark.parametrize(
    ("target", "least", "used"),
    [(None, "0.23.9", True), ("tract==0.23.9", "0.23.9", True), ("tract==0.23.5", "0.23.0", False)],
)
def test_an_operator_that_the_target_lacks_is_written_by_others_and_the_manifest_says_the_least(
    tmp_path, target, least, used
):
    report = export_nnef(Sums(), tmp_path / "out", example_args=(IMAGE,), target=target, format="dir")
    assert report.check == "passed"
    assert ExportManifest.read(tmp_path / "out").least_tract == least
    assert ("tract_core_cumsum" in ArchiveReader(report.archive).text()) == used


def test_what_the_target_cannot_run_is_refused_with_what_would(tmp_path):
    inputs = (IMAGE, torch.zeros(2, 4, 4, 2))
    with pytest.raises(EmitError, match=r"tract_core_grid_sample \(since 0\.23\.3\); export it for tract==0\.23\.3"):
        export_nnef(Samples(), tmp_path / "out", example_args=inputs, target="tract==0.23.2", check=False)
    assert not (tmp_path / "out").exists()


def test_a_target_of_another_form_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="tract==X"):
        export_nnef("no/such-model", tmp_path / "out", target="0.23.5")


@pytest.mark.tract
@pytest.mark.skipif(not (WHEELS / "0.23.0/tract").is_dir(), reason="scripts/test fetches the wheels")
def test_the_oldest_target_runs_what_is_written_for_it(tmp_path):
    report = export_nnef(Sums(), tmp_path / "out", example_args=(IMAGE,), target="tract==0.23.0", check=False)
    with TractRunner(report.archive, tract_folder=WHEELS / "0.23.0", timeout_s=120) as runner:
        assert runner.version.startswith("0.23.0")
        got = runner.run({next(iter(runner.inputs)): IMAGE.numpy()})
    np.testing.assert_allclose(next(iter(got.values())), Sums()(IMAGE).numpy(), rtol=1e-5, atol=1e-5)
