import pytest
import torch
from torch import nn

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.export.module_interface import evaluation_mode, module_interface


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.inner = nn.ModuleDict({"parts": nn.ModuleList([nn.Linear(3, 3)])})
        self.runs = 0

    def forward(self, x, others, *, scale=None):
        total = x + others["a"] + others["b"]
        return {"total": total if scale is None else total * scale, "first": x}


X = torch.ones(2, 3)
OTHERS = {"a": X, "b": X}


def test_names_come_from_the_parameters_and_the_keys_of_the_result():
    interface = module_interface(Sums(), args=(X, OTHERS), kwargs={"scale": torch.tensor(2.0)})
    assert interface.input_names == ("x", "others_a", "others_b", "scale")
    assert interface.output_names == ("output_total", "output_first")


def test_a_single_result_is_called_output():
    interface = module_interface(nn.Linear(3, 4), args=(X,))
    assert (interface.input_names, interface.output_names) == (("input",), ("output",))


def test_an_output_that_would_be_called_like_an_input_gets_another_name():
    class Same(nn.Module):
        def forward(self, output):
            return output + 1

    assert module_interface(Same(), args=(X,)).output_names == ("output_out",)


def test_given_names_are_taken():
    interface = module_interface(nn.Linear(3, 4), args=(X,), input_names=["pixels"], output_names=["scores"])
    assert (interface.input_names, interface.output_names) == (("pixels",), ("scores",))


def test_a_wrong_number_of_input_names_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"input_names has 2 names \(a, b\); the examples hold 1"):
        module_interface(nn.Linear(3, 4), args=(X,), input_names=["a", "b"])


def test_examples_that_do_not_fit_forward_are_refused():
    with pytest.raises(ConfigError, match="do not fit forward"):
        module_interface(nn.Linear(3, 4), args=(X, X))


def test_a_module_that_fails_on_its_examples_is_named():
    with pytest.raises(CaptureError, match="Linear does not run on its examples"):
        module_interface(nn.Linear(4, 3), args=(X,))


class ReadsItsWeight(nn.Linear):
    def forward(self, x):
        return x if self.weight.view(-1).argmax() > 3 else -x


def test_a_module_that_reads_values_of_its_weights_is_told_the_line():
    with pytest.raises(CaptureError, match=r"reads a tensor's value .*argmax\(\) > 3 else -x; what it decides"):
        module_interface(ReadsItsWeight(3, 4), args=(X,))


def test_the_outermost_lists_are_the_layers():
    assert module_interface(Sums(), args=(X, OTHERS)).layers == ("layers", "inner.parts")


def test_no_weight_is_read_to_find_the_names():
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    module.bias = nn.Parameter(torch.empty(4, device="meta"))
    assert module_interface(module, args=(X,)).output_names == ("output",)


def test_every_module_gets_its_own_mode_back_even_after_an_error():
    module = Sums().train()
    module.layers[0].eval()

    def fails():
        with evaluation_mode(module):
            assert not any(child.training for child in module.modules())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert module.training
    assert not module.layers[0].training
    assert module.layers[1].training


def test_inputs_that_forward_collects_are_named_once():
    class Collecting(nn.Module):
        def forward(self, *values, **named):
            return values[0] + values[1] + named["z"] + named["b"]

    interface = module_interface(Collecting(), args=(X, X), kwargs={"z": X, "b": X})
    assert interface.input_names == ("values_0", "values_1", "z", "b")


def test_names_that_become_the_same_identifier_are_told_apart():
    class Alike(nn.Module):
        def forward(self, x):
            return {"a.b": x + 1, "a_b": x + 2}

    assert module_interface(Alike(), args=(X,)).output_names == ("output_a_b", "output_a_b_1")


def test_a_module_without_python_code_is_refused():
    module = nn.Linear(3, 4)
    module.forward = min  # a built-in function without a signature, as the forward of a scripted module is
    with pytest.raises(ConfigError, match="not a module of Python code"):
        module_interface(module, args=(X,))


class Shared(nn.Module):
    """One linear layer under three names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(3, 3)
        self.layers = nn.ModuleList([self.first, nn.Linear(3, 3)])

    def forward(self, x):
        return self.layers[1](self.layers[0](self.second(self.first(x))))


def test_a_module_with_several_names_keeps_its_own_weights():
    module = Shared()
    weight = module.first.weight
    module_interface(module, args=(X,))
    assert module.first.weight is weight


def test_a_tensor_that_forward_keeps_of_the_run_on_shapes_does_not_stay():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(2, 3)

        def forward(self, x):
            self.last = self.newest = x + 1
            return x

    module = Keeping()
    before = module.last
    module_interface(module, args=(X,))
    assert module.last is before
    assert not hasattr(module, "newest")
