"""What a user's own code keeps, and asks of its layers, is not lost without a check: PyTorch's results would tell."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError
from t2n_hf.tract.runner import TractRunner


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Other(Layer):
    pass


class Stack(nn.Module):
    def __init__(self, kinds=(Layer, Other)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind() for _ in range(4 // len(kinds)) for kind in kinds])
        self.__dict__["chosen"] = self.layers[2]
        self.calls = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.factor(layer)
        return x

    def factor(self, layer):
        return 1


class ByType(Stack):
    def factor(self, layer):
        return 3 if type(layer) is Other else 1


class ByIdentity(Stack):
    def factor(self, layer):
        return 3 if layer is self.chosen else 1


class ByParts(Stack):
    def factor(self, layer):
        return len(list(layer.parameters())) + len(list(self.modules()))


class CountsCalls(Stack):
    def factor(self, layer):
        self.calls += 1
        return self.calls


class Counting(Layer):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Repeating(Layer):
    def forward(self, x):
        self.calls += 1
        self.shape, self.kept = tuple(x.shape), {"x": x}
        return super().forward(x)


class Remembering(Layer):
    """As rotary positions of Wav2Vec2-Conformer: what was made for a length is kept for the next such call."""

    def __init__(self):
        super().__init__()
        self.length, self.places = None, None

    def forward(self, x):
        if x.shape[0] != self.length or self.places is None:
            self.length, self.places = x.shape[0], torch.arange(x.shape[0], dtype=x.dtype)[:, None]
        return super().forward(x) + self.places


class Growing(Layer):
    def forward(self, x):
        self.extra = nn.Identity()
        return self.extra(super().forward(x))


def exported(module, tmp_path, **options):
    length = {0: Dim("S", min=2, max=64)}
    return export_nnef(
        module, tmp_path / "export", example_args=(torch.zeros(5, 4),), dynamic_shapes=(length,), **options
    )


@pytest.mark.tract
@pytest.mark.parametrize("kind", [ByType, ByIdentity, ByParts])
def test_what_a_model_asks_of_its_layers_is_answered_by_them(kind, tmp_path):
    module, x = kind().eval(), torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    report = exported(module, tmp_path, check=False)
    with TractRunner(report.archive) as runner, torch.no_grad():
        np.testing.assert_allclose(runner.run({"x": x.numpy()})["output"], module(x).numpy(), rtol=1e-4)


@pytest.mark.parametrize("capture", ["auto", "pieces", "whole", "dispatch"])
@pytest.mark.parametrize("kinds", [None, (Counting,)], ids=["of_the_model", "of_layers"])
def test_counts_of_calls_are_refused_and_put_back(kinds, capture, tmp_path):
    module = CountsCalls() if kinds is None else Stack(kinds)
    with pytest.raises(CaptureError, match=r"another graph each time .* a count of its calls"):
        exported(module, tmp_path, check=False, capture=capture)
    assert [part.calls for part in (module, *module.layers)] == [0] * (len(module.layers) + 1)


def test_what_is_kept_and_changes_no_result_is_no_reason_to_refuse(tmp_path):
    module = Stack((Repeating,))
    exported(module, tmp_path, check=False)
    assert [layer.calls for layer in module.layers] == [0] * 4
    assert not any(hasattr(layer, name) for layer in module.layers for name in ("shape", "kept"))


@pytest.mark.tract
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's own, of what is remembered
def test_what_is_remembered_of_a_length_is_no_reason_to_refuse(tmp_path):
    module, x = Stack((Remembering,)), torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    report = exported(module, tmp_path, check=False)
    with TractRunner(report.archive) as runner, torch.no_grad():
        np.testing.assert_allclose(runner.run({"x": x.numpy()})["output"], module(x).numpy(), rtol=1e-4)


@pytest.mark.tract
@pytest.mark.parametrize("check", [False, True])
def test_parts_that_a_forward_adds_are_gone_after_an_export(check, tmp_path):
    module = Stack((Growing,))
    before = list(module.modules())
    exported(module, tmp_path, check=check)
    assert list(module.modules()) == before


@pytest.mark.parametrize("capture", ["auto", "pieces"])
def test_layers_that_share_weights_are_pieces_all_the_same(capture, tmp_path):
    module = Stack((Layer,))
    module.layers[2] = module.layers[0]
    module.layers[3].linear.weight = module.layers[1].linear.weight
    report = exported(module, tmp_path, check=False, capture=capture, format="dir")
    assert (report.archive / "graph.nnef").read_text().count("= layer(") == 4


def test_pieces_that_whole_layers_do_not_confirm_are_refused(tmp_path):
    with pytest.raises(CaptureError, match="captured whole has another graph than captured in pieces"):
        exported(ByType(), tmp_path, check=False, capture="pieces")
