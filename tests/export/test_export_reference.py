import numpy as np
import pytest
import sympy
import torch
from torch import nn

from t2n_hf.errors import CheckError
from t2n_hf.export.module_interface import module_interface
from t2n_hf.export.reference import InputSpec, bounds_of, exact_tensors, plan_lengths, run_references
from t2n_hf.hf.plan import Choice
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

S, P, N = sympy.symbols("S P N")
CAUSAL = (
    InputSpec(name="input_ids", dtype="i64", shape=(1, S)),
    InputSpec(name="in_cache_key_0", dtype="f32", shape=(1, 2, P, 4)),
)


def test_a_shape_is_made_of_the_values_of_its_symbols():
    assert InputSpec(name="x", dtype="f32", shape=(2, 2 * N + 1)).concrete({"N": 4}) == (2, 9)


def test_a_model_with_a_past_is_called_with_prefill_past_and_single_tokens_at_other_lengths_than_the_example():
    (calls,) = plan_lengths(CAUSAL, {}, {"max_context": 2048})
    assert calls == [{"S": 7, "P": 0}, {"S": 3, "P": 7}, {"S": 1, "P": 10}, {"S": 1, "P": 11}]


def test_calls_beyond_the_positions_of_a_small_model_are_left_out():
    (calls,) = plan_lengths(CAUSAL, {}, {"max_context": 9})
    assert calls == [{"S": 7, "P": 0}, {"S": 1, "P": 7}, {"S": 1, "P": 8}]


def test_a_model_that_switches_at_a_length_is_called_on_both_sides_of_it():
    sequences = plan_lengths(CAUSAL, {}, {"max_context": 64, "rope_switch": 32})
    assert sequences[1:] == [[{"S": 32, "P": 0}], [{"S": 33, "P": 0}]]


def test_a_module_without_a_past_is_called_at_three_lengths_within_its_bounds():
    specs = (InputSpec(name="x", dtype="f32", shape=(N, S)),)
    calls = [call for (call,) in plan_lengths(specs, {"N": (2, 5)}, {})]
    assert calls == [{"N": 3, "S": 8}, {"N": 5, "S": 1}, {"N": 2, "S": 3}]


def test_a_module_without_symbols_is_called_once():
    assert plan_lengths((InputSpec(name="x", dtype="f32", shape=(2, 3)),), {}, {}) == [[{}]]


def test_bounds_are_those_of_the_dims_wherever_they_are():
    n = torch.export.Dim("n", min=2, max=9)
    shapes = ({0: n}, [{1: 2 * n}, None], {"deep": {0: torch.export.Dim("m")}, "hint": torch.export.Dim.AUTO})
    assert bounds_of(shapes) == {"n": (2, 9), "m": (0, None)}


def test_tensors_in_f32_are_shown_as_they_are_and_others_without_a_copy_of_large_ones():
    module = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700).to(torch.bfloat16))
    shown = exact_tensors(module)
    assert shown["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert isinstance(shown["1.weight"], OffloadedTensor)
    assert shown["1.weight"].dtype == torch.float32
    assert torch.equal(shown["1.weight"].to_base_tensor(), module[1].weight.float())
    assert torch.equal(shown["1.bias"], module[1].bias.float())


def test_a_packed_weight_is_shown_in_f32_with_its_own_values():
    module = nn.Linear(64, 8, bias=False)
    packed = QTensorTractScaleOnly.quantize(module.weight.detach(), dtype=torch.bfloat16)
    module.weight = nn.Parameter(packed, requires_grad=False)
    shown = exact_tensors(module)["weight"]
    assert isinstance(shown, QTensorTractScaleOnly)
    assert shown.dtype == torch.float32
    expected = QTensorTractScaleOnly.quantize(packed.to(torch.float32).to_base_tensor()).to_base_tensor()
    assert shown.to_base_tensor().shape == expected.shape


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_is_quantized_while_exporting_is_shown_with_the_values_of_the_archive(transposed):
    module = nn.Linear(64, 32, bias=False)
    choice = Choice(format=QTensorTractScaleOnly, transposed=transposed)
    shown = exact_tensors(module, {"weight": choice})["weight"].to_base_tensor()
    held = module.weight.detach().t().contiguous() if transposed else module.weight.detach()
    expected = QTensorTractScaleOnly.quantize(held).to_base_tensor()
    assert torch.equal(shown, expected.t() if transposed else expected)


def test_tied_tensors_stay_tied():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.float16)
    module[1].weight = module[0].weight
    shown = exact_tensors(module)
    assert shown["0.weight"] is shown["1.weight"]


def test_integers_are_left_to_the_module():
    module = nn.BatchNorm1d(3)
    assert "num_batches_tracked" not in exact_tensors(module)


class Counter(nn.Module):
    """The past is one tensor that grows; the result is its sum."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.drop = nn.Dropout(0.5)

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, past):
        grown = torch.cat([past, self.drop(self.table(input_ids))], dim=1)
        return grown.sum(dim=1), grown


def counter_interface(module):
    return module_interface(
        module,
        args=(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 6, 4)),
        input_names=["input_ids", "in_cache_key_0"],
        output_names=["outputs", "out_cache_key_0"],
    )


COUNTER_SPECS = (
    InputSpec(name="input_ids", dtype="i64", shape=(1, S)),
    InputSpec(name="in_cache_key_0", dtype="f32", shape=(1, P, 4)),
)


def test_each_call_takes_the_caches_of_the_one_before_and_dropout_is_off():
    module = Counter().train()
    calls = [[{"S": 3, "P": 0}, {"S": 2, "P": 3}]]
    first, second = run_references(counter_interface(module), COUNTER_SPECS, calls, exact_tensors(module))
    assert first.inputs["in_cache_key_0"].shape == (1, 0, 4)
    assert second.fed_back == {"in_cache_key_0": "out_cache_key_0"}
    assert set(second.inputs) == {"input_ids"}
    ids = np.concatenate([first.inputs["input_ids"], second.inputs["input_ids"]], axis=1)
    expected = module.table.weight.detach().numpy()[ids].sum(axis=1)
    np.testing.assert_allclose(second.outputs["outputs"], expected, rtol=1e-6)
    assert module.training
    assert str(second) == "S=2, P=3"


def test_token_ids_are_spread_over_the_vocabulary_and_always_the_same():
    module = Counter()
    calls = [[{"S": 40, "P": 0}]]
    once, again = (
        run_references(counter_interface(module), COUNTER_SPECS, calls, exact_tensors(module))[0] for _ in range(2)
    )
    ids = once.inputs["input_ids"]
    assert len(set(ids.flat)) > 20
    assert ids.min() >= 0
    assert ids.max() < 50
    np.testing.assert_array_equal(ids, again.inputs["input_ids"])


def test_other_integers_are_those_of_the_example():
    class Pick(nn.Module):
        def forward(self, index):
            return torch.tensor([1.0, 2.0])[index]

    interface = module_interface(Pick(), args=(torch.tensor([1, 0, 1]),))
    specs = (InputSpec(name="index", dtype="i64", shape=(N,)),)
    (step,) = run_references(interface, specs, [[{"N": 5}]], {})
    assert step.inputs["index"].tolist() == [1, 0, 1, 1, 0]
    assert step.outputs["output"].tolist() == [2.0, 1.0, 2.0, 2.0, 1.0]


def test_a_module_that_writes_to_its_input_leaves_the_one_that_tract_is_given():
    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2) + 1

    x = torch.arange(3.0)
    interface = module_interface(Doubling(), args=(x,))
    (step,) = run_references(interface, [InputSpec(name="x", dtype="f32", shape=(3,))], [[{}]], {})
    np.testing.assert_allclose(step.outputs["output"], step.inputs["x"] * 2 + 1)
    assert x.tolist() == [0, 1, 2]


def test_a_model_in_half_precision_is_run_in_f32():
    module = nn.Linear(16, 16).to(torch.float16)
    interface = module_interface(module, args=(torch.randn(2, 16).to(torch.float16),))
    specs = (InputSpec(name="input", dtype="f16", shape=(N, 16)),)
    (step,) = run_references(interface, specs, [[{"N": 3}]], exact_tensors(module))
    expected = nn.functional.linear(torch.from_numpy(step.inputs["input"]), module.weight.float(), module.bias.float())
    assert step.outputs["output"].dtype == np.float32
    np.testing.assert_allclose(step.outputs["output"], expected.detach().numpy(), rtol=1e-6)
    assert module.weight.dtype == torch.float16


def test_a_module_that_does_not_run_in_f32_is_an_error_that_says_so():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.linear(x.double())

    module = Mixed()
    interface = module_interface(module, args=(torch.ones(2, 3),))
    specs = [InputSpec(name="x", dtype="f32", shape=(2, 3))]
    with pytest.raises(CheckError, match="does not run Mixed in f32"):
        run_references(interface, specs, [[{}]], exact_tensors(module))
