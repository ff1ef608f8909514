import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Padded(nn.Module):
    """Pads to an even length, by a number that it takes out of a tensor, and writes into a part of what it made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("stride", torch.tensor(2), persistent=False)

    def forward(self, x):
        missing = int((torch.ceil(torch.tensor(x.shape[0]) / self.stride) * self.stride).item()) - x.shape[0]
        x = torch.cat([x, x.new_zeros(missing, 4)])
        first = x[0]
        first.add_(1)
        first.mul_(2)
        return self.linear(x)


class Branching(Padded):
    def forward(self, x):
        return self.linear(x) if (x > 5).any() else -self.linear(x)


def test_what_torch_export_refuses_is_exported_at_the_lengths_of_its_example(tmp_path):
    module = Padded()
    report = export_nnef(module, tmp_path / "out", example_args=(X,))
    assert report.check == "passed"
    assert report.fixed_shapes
    assert "lengths   fixed" in str(report)
    manifest = ExportManifest.read(tmp_path / "out")
    assert manifest.fixed_shapes
    assert (list(manifest.symbols), manifest.inputs[0]["shape"], manifest.outputs[0]["shape"]) == ([], [3, 4], [4, 4])
    assert "at these shapes alone" in (tmp_path / "out" / "README.md").read_text()
    with TractRunner(report.archive, timeout_s=60) as runner:
        result = runner.run({"x": (X * 3).numpy()})["output"]
    np.testing.assert_allclose(result, module(X * 3).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_branch_on_values_is_refused_unless_it_is_accepted_by_name(tmp_path):
    module = Branching()
    with pytest.raises(CaptureError, match=r"reads a tensor's value.*\(x > 5\).any\(\).*capture='dispatch'"):
        export_nnef(module, tmp_path / "out", example_args=(X,), output_names=["y"])
    report = export_nnef(module, tmp_path / "out", example_args=(X,), capture="dispatch")
    (read,) = report.reads
    assert "gave False at test_export_fixed_lengths.py:" in read
    assert list(ExportManifest.read(tmp_path / "out").reads) == [read]
    assert read in str(report)
    assert str(tmp_path.home()) not in (tmp_path / "out" / "t2n_export.json").read_text()


def test_an_archive_with_free_lengths_says_nothing_of_the_kind(tmp_path):
    report = export_nnef(
        nn.Linear(4, 4), tmp_path / "out", example_args=(X,), dynamic_shapes={"input": {0: Dim("S", min=1)}}
    )
    assert not report.fixed_shapes
    assert not ExportManifest.read(tmp_path / "out").fixed_shapes
    assert "fixed" not in str(report)
