import models
import numpy as np
import pytest
import torch
from lowering_cases import archive, dequantize, largest_difference, run_steps, torch_steps
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from t2n_hf.errors import MissingEmittersError
from t2n_hf.export.lower import WeightFormatInfo, emitter_table, lower, missing_emitters
from t2n_hf.hf.tasks import interface_of
from t2n_hf.nnef.text import to_text
from t2n_hf.ops.table import EMITTERS
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.tract.runner import TractRunner

Q4, Q4_TURNED = WeightFormatInfo("q4_0"), WeightFormatInfo("q4_0", transposed=True)
MODELS = {"llama": models.m1, "qwen3": models.m3, "mixtral": models.m4, "gemma3": models.m5, "gpt2": models.m10}


def interface(module, example, symbols=None, names=("y",)):
    """One input `x`; `symbols` are its axes of free length."""
    dims = {axis: Dim(name, min=1, max=1 << 20) for axis, name in (symbols or {}).items()}
    return Interface(
        module=module.eval(),
        args=(example,),
        dynamic_shapes=(dims or None,),
        input_names=("x",),
        output_names=names,
        weight_owner=module,
    )


def lowered(module, example, formats=None, **options):
    face = interface(module, example, **options)
    return lower(capture(face, torch.float32), formats or {}, dtype="f32")


def run(folder, x):
    with TractRunner(folder) as runner:
        return runner.run({"x": x.numpy()})["y"]


def ops_of(result):
    body = [*result.document.body, *(call for fragment in result.document.fragments for call in fragment.body)]
    return [call.op for call in body]


@pytest.mark.tract
@pytest.mark.parametrize("name", MODELS)
def test_pieces_and_the_whole_capture_agree_in_tract_and_with_pytorch(name, tmp_path):
    face = interface_of(MODELS[name]())
    pieces, once = archive(face, tmp_path / "pieces", mode="pieces")
    _, each = archive(face, tmp_path / "whole", mode="whole")
    assert once.document.fragments
    assert to_text(once.document) == to_text(each.document)
    flat, in_place = archive(face, tmp_path / "flat", mode="whole", flat=True)
    assert not in_place.document.fragments
    got = run_steps(pieces, face)
    assert largest_difference(got, run_steps(flat, face)) < 2e-6
    assert largest_difference(got, torch_steps(face)) < 5e-6


@pytest.mark.tract
@pytest.mark.parametrize("options", [{"flat": True}, {"attention": "sdpa"}], ids=["layers in place", "sdpa"])
def test_options_change_the_text_and_not_the_results(options, tmp_path):
    face = interface_of(models.m1())
    folder, result = archive(face, tmp_path / "options", **options)
    assert bool(result.document.fragments) == ("flat" not in options)
    assert ("tract_transformers_sdpa" in ops_of(result)) == ("attention" in options)
    assert largest_difference(run_steps(folder, face), torch_steps(face)) < 5e-6


def test_layers_that_differ_in_what_they_are_given_share_a_fragment():
    result = lower(capture(interface_of(models.m5()), torch.float32), {}, dtype="f32")
    assert [f.name for f in result.document.fragments] == ["gemma3_decoder_layer"]
    calls = [call for call in result.document.body if call.op == "gemma3_decoder_layer"]
    assert len(calls) == 6
    masks = [arg.text for call in calls for arg in call.args if arg.text.startswith("attention_mask")]
    assert masks == ["attention_mask"] * 5 + ["attention_mask_1"]
    assert [call.op for call in result.document.body].count("select") == 2


def test_kinds_of_layers_have_fragments_of_their_own_named_after_their_class():
    kinds = {"layer_types": ["full_attention"] * 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    model = models.m4_qwen3(num_hidden_layers=4, mlp_only_layers=[0, 2], **kinds)
    result = lower(capture(interface_of(model), torch.float32), {}, dtype="f32")
    names = ["qwen3_moe_decoder_layer", "qwen3_moe_decoder_layer_1"]
    assert [f.name for f in result.document.fragments] == names
    calls = [call.op for call in result.document.body if call.op in names]
    assert calls == names * 2


def test_what_all_layers_share_is_computed_outside_the_fragment():
    result = lower(capture(interface_of(models.m1()), torch.float32), {}, dtype="f32")
    (fragment,) = result.document.fragments
    assert "select" not in [call.op for call in fragment.body]
    assert [call.op for call in result.document.body].count("select") == 1


def test_no_operator_computes_a_length():
    for make in (models.m1, models.m10):
        result = lower(capture(interface_of(make()), torch.float32), {}, dtype="f32")
        assert not {"shape_of", "tract_core_shape_of"} & set(ops_of(result))


def test_the_text_is_the_same_each_time():
    texts = {
        to_text(lower(capture(interface_of(models.m1()), torch.float32), {}, dtype="f32").document) for _ in range(2)
    }
    assert len(texts) == 1


def test_tied_weights_are_one_variable():
    result = lower(capture(interface_of(models.m1()), torch.float32), {}, dtype="f32")
    names = [binding.fqn for binding in result.bindings if binding.fqn]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == len(list(models.m1().parameters()))


def test_a_caller_may_say_which_name_a_tied_weight_is_written_under():
    captured = capture(interface_of(models.m1()), torch.float32)
    result = lower(captured, {}, dtype="f32", canonical={"model.embed_tokens.weight": "lm_head.weight"})
    assert "lm_head.weight" in [binding.fqn for binding in result.bindings]


def test_buffers_that_no_checkpoint_stores_come_with_their_values():
    model = models.m1()
    result = lower(capture(interface_of(model), torch.float32), {}, dtype="f32")
    (constant,) = [binding for binding in result.bindings if binding.fqn is None]
    assert constant.label == "model.rotary_emb.inv_freq"
    assert torch.equal(constant.value, model.model.rotary_emb.inv_freq)


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        return torch.linalg.inv(torch.special.airy_ai(self.first(x))) + torch.special.airy_ai(self.second(x))


def test_operators_without_an_emitter_are_all_listed_with_the_place_that_uses_them():
    captured = capture(interface(Unknown(), torch.zeros(4, 4)), torch.float32)
    missing = missing_emitters(captured)
    assert {row.op for row in missing} == {"aten.special_airy_ai.default", "aten.linalg_inv.default"}
    assert all("test_export_lower.py" in row.source_line for row in missing)
    with pytest.raises(MissingEmittersError, match="2 operators") as error:
        lower(captured, {}, dtype="f32")
    assert "aten.special_airy_ai.default" in str(error.value)
    assert "aten.linalg_inv.default" in str(error.value)


def test_calls_of_the_capture_itself_have_emitters_beside_those_of_the_table():
    assert len(emitter_table()) == len(EMITTERS) + 3


# Block formats


def q4_formats(model):
    formats = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            formats[f"{name}.weight"] = Q4
        elif type(module).__name__ == "Conv1D":
            formats[f"{name}.weight"] = Q4_TURNED
    return formats


@pytest.mark.tract
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_block_weights_are_used_as_they_are_stored(name, tmp_path):
    model = MODELS[name]()
    formats = q4_formats(model)
    face = interface_of(model)
    folder, result = archive(face, tmp_path / name, formats)
    assert {b.fqn for b in result.bindings if b.format == "q4_0"} >= {n for n in formats if n != "lm_head.weight"}
    got = run_steps(folder, face)
    dequantize(model, formats)
    assert largest_difference(got, torch_steps(face)) < 5e-5


def test_a_turned_weight_is_declared_as_it_is_stored():
    model = models.m10()
    result = lower(capture(interface_of(model), torch.float32), q4_formats(model), dtype="f32")
    shapes = {binding.fqn: binding.shape for binding in result.bindings}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (192, 64)


class Experts(nn.Module):
    """A weight of three axes, of which rows are chosen by index, and used from either side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(3, 64, 32)), nn.Parameter(torch.randn(3, 64, 32))

    def forward(self, x):
        chosen = torch.tensor([2, 0])
        wide = torch.bmm(x.expand(2, -1, -1), self.up[chosen].transpose(1, 2))
        return torch.bmm(wide, self.down[chosen])


@pytest.mark.tract
def test_experts_are_chosen_from_block_weights(tmp_path):
    module = Experts()
    formats = {"up": Q4, "down": Q4}
    x = torch.randn(1, 5, 32)
    folder, result = archive(interface(module, x, {1: "S"}), tmp_path / "experts", formats)
    assert [binding.format for binding in result.bindings if binding.fqn] == ["q4_0", "q4_0"]
    got = run(folder, x)
    dequantize(module, formats)
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-3, atol=1e-2)


class Constant(nn.Module):
    """Rows of a table by constant numbers, which a folding exporter would compute from a weight it must not read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 32)

    def forward(self, x):
        return self.table(torch.tensor([3, 1, 4])) + x


@pytest.mark.tract
@pytest.mark.parametrize("formats", [{}, {"table.weight": Q4}], ids=["dense", "q4_0"])
def test_rows_by_constant_numbers_equal_pytorch(formats, tmp_path):
    module, x = Constant(), torch.randn(3, 32)
    folder, _ = archive(interface(module, x), tmp_path / "constant", formats)
    got = run(folder, x)
    dequantize(module, formats)
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-6, atol=1e-6)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x) + (self.linear.weight * 2).sum()


@pytest.mark.tract
def test_a_weight_whose_blocks_cannot_be_used_is_dense_with_a_reason(tmp_path):
    module, x = UsedTwice(), torch.randn(4, 32)
    folder, result = archive(interface(module, x), tmp_path / "twice", {"linear.weight": Q4})
    binding = next(binding for binding in result.bindings if binding.fqn == "linear.weight")
    assert binding.format == "dense"
    assert "aten.mul.Tensor" in binding.reason
    np.testing.assert_allclose(run(folder, x), module(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_a_block_weight_on_the_wrong_side_is_dense():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return x @ self.weight

    turned = lowered(Wrong(), torch.zeros(4, 32), {"weight": Q4_TURNED})
    assert turned.bindings[0].format == "q4_0"
    plain = lowered(Wrong(), torch.zeros(4, 32), {"weight": Q4})
    assert plain.bindings[0].format == "dense"
    assert "aten.matmul.default" in plain.bindings[0].reason


def test_one_layer_in_another_format_shares_the_fragment_when_the_text_is_the_same():
    model = models.m1()
    formats = q4_formats(model)
    del formats["model.layers.1.mlp.up_proj.weight"]
    result = lower(capture(interface_of(model), torch.float32), formats, dtype="f32")
    assert len(result.document.fragments) == 1


class Forms(nn.Module):
    """Results that are inputs, weights, and one another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * 2
        return y, y, x, self.weight, F.relu(y)


@pytest.mark.tract
def test_every_result_has_its_name_even_inputs_weights_and_repeated_ones(tmp_path):
    module, x = Forms(), torch.randn(3)
    face = interface(module, x, names=("a", "b", "c", "d", "e"))
    folder, _ = archive(face, tmp_path / "forms")
    with TractRunner(folder) as runner:
        outputs = runner.run({"x": x.numpy()})
    for name, want in zip("abcde", module(x), strict=True):
        np.testing.assert_allclose(outputs[name], want.detach().numpy(), rtol=1e-6)


@pytest.mark.tract
def test_numbers_may_be_results(tmp_path):
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Buffer(torch.tensor(0.75))

        def forward(self, x):
            return x * self.factor, torch.tensor(2.5), self.factor, torch.tensor(3), torch.tensor(True)

    module, x = Numbers(), torch.randn(3)
    folder, _ = archive(interface(module, x, names=("a", "b", "c", "d", "e")), tmp_path / "numbers")
    with TractRunner(folder) as runner:
        outputs = runner.run({"x": x.numpy()})
    for name, want in zip("abcde", module(x), strict=True):
        np.testing.assert_equal(outputs[name], want.numpy(), strict=True)


@pytest.mark.model
def test_the_text_of_smollm2_stays_short_enough_to_read(smollm2):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    properties = {f"property_{i}": "value" for i in range(5)}
    result = lower(capture(interface_of(model), torch.float32), {}, dtype="f32", properties=properties)
    text = to_text(result.document)
    assert text.count("\n") <= 500
    assert len(text.encode()) <= 70_000
