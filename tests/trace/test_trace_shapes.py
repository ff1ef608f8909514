"""A module run on shapes alone leaves nothing behind: neither in itself nor in what its code keeps between calls."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError
from t2n_hf.trace.shapes import shapes_only


class Anchored(nn.Module):
    """Adds a grid that is made once for each length, as models that detect objects do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @staticmethod
    @compile_compatible_method_lru_cache(maxsize=32)
    def grid(length):
        return torch.arange(length).unsqueeze(1)

    def forward(self, x):
        return {"y": x * self.weight + self.grid(x.shape[0])}


def test_what_code_keeps_for_later_calls_has_values():
    module = Anchored()
    with shapes_only(module):
        result = module(torch.zeros(4, 3))["y"]
        assert isinstance(result, FakeTensor)
        assert tuple(result.shape) == (4, 3)
    assert torch.equal(module(torch.zeros(4, 3))["y"][:, 0], torch.arange(4.0))
    assert not isinstance(module.weight, FakeTensor)


def test_a_model_runs_as_before_after_its_export(tmp_path):
    module = Anchored()
    export_nnef(module, tmp_path / "out", example_args=(torch.zeros(5, 3),), check=False)
    assert torch.equal(module(torch.zeros(5, 3))["y"][:, 0], torch.arange(5.0))


class Chooser(nn.Module):
    """Asks which of its inputs are positive, or whether the first is."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        return self.ask(x)


@pytest.mark.parametrize("ask", [lambda x: x.nonzero(), lambda x: x[0].item()], ids=["how many", "what"])
def test_a_module_that_asks_for_values_is_refused_with_the_line_that_asks(ask):
    module = Chooser(ask)
    says = r"forward of Chooser reads a tensor's value .* at .*lambda x: .*dispatch"
    with pytest.raises(CaptureError, match=says), shapes_only(module):
        module(torch.ones(3))


def test_a_module_that_fails_says_where_and_what_to_do():
    module = Chooser(lambda x: x.view(7, 7))
    said = r"Chooser fails when .* x.view\(7, 7\)\)\). Export the model with"
    with pytest.raises(CaptureError, match=said), shapes_only(module):
        module(torch.zeros(3))


def test_what_a_module_only_checks_holds():
    def checked(x):
        torch._check_tensor_all(x > 0)
        return x * 2

    with shapes_only(Chooser(checked)) as _:
        assert tuple(Chooser(checked)(torch.zeros(3)).shape) == (3,)
