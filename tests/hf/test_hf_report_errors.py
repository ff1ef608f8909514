"""Relative errors in the report, against numpy and the whole weights; and what the table shows."""

import models
import numpy as np
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.hf.packing import quantized
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.sampled_error import SampledError
from t2n_hf.registry import format_class
from t2n_hf.tensor import QScalePerGroupF16, QTensor


def load(model, folder, quantization=None, **options):
    return type(model).from_pretrained(folder, dtype="auto", quantization_config=quantization, **options)


def whole_error(values, packed):
    true, found = values.detach().float().numpy(), packed.to(torch.float32).to_base_tensor().numpy()
    return np.linalg.norm(found - true) / np.linalg.norm(true)


CASES = [(name, "q4_0", place) for name in ("m1", "m4", "m10") for place in (None, {"": "disk"})]
CASES += [(name, weights, None) for name in ("m4", "m10") for weights in ("q8_1", "ternary", "int8_rows")]


@pytest.mark.parametrize(("name", "weights", "device_map"), CASES, ids=str)
def test_errors_are_those_of_the_whole_weights(name, weights, device_map, tmp_path):
    source = getattr(models, name)()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(weights), device_map=device_map)
    rows = [row for row in packed.t2n_report().rows if row.quantized]
    assert len(rows) >= 7
    for row in rows:
        true = source.get_parameter(row.name)
        sampled = max(row.shape[-2:]) >= 128  # of the others, all rows are compared
        whole = whole_error(true, packed.get_parameter(row.name))
        assert row.relative_error == pytest.approx(whole, rel=0.03 if sampled else 1e-4), row


def test_what_is_float_or_was_quantized_before_has_none(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    assert {row.relative_error for row in packed.t2n_report().rows if not row.quantized} == {None}
    again = load(source, models.saved(packed, tmp_path))
    assert {row.relative_error for row in again.t2n_report().rows} == {None}
    assert again.t2n_report() == packed.t2n_report()
    assert "unknown" in str(again.t2n_report())


def test_a_tied_table_has_its_error_under_the_name_that_is_kept(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(lm_head="q4_0"))
    row = next(row for row in packed.t2n_report().rows if row.name == "model.embed_tokens.weight")
    whole = whole_error(source.model.embed_tokens.weight, packed.lm_head.weight)
    assert row.relative_error == pytest.approx(whole, rel=0.05)  # a quarter of its rows is compared


def test_a_sample_of_a_large_weight_is_near_the_whole():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, 64, generator=generator) * torch.rand(3000, 1, generator=generator)
    error = SampledError()
    packed = quantized(
        values, Choice(format=format_class("q4_0")), dtype=torch.float32, name="w", compute="fast", error=error
    )
    assert error.relative == pytest.approx(whole_error(values, packed), rel=0.1)


def test_of_a_class_that_does_not_tell_rows_apart_nothing_is_known():
    error = SampledError()
    error.add(torch.zeros(4, 32), format_class("q4_0").quantize(torch.zeros(4, 32)))
    assert error.relative == 0.0
    error.add(torch.randn(4, 32), QTensor(torch.randn(4, 32), QScalePerGroupF16.fitted(torch.randn(4, 32))))
    assert error.relative is None


def test_the_table_puts_numbered_layers_together(tmp_path):
    source = models.m4()
    report = load(source, models.saved(source, tmp_path), T2NConfig()).t2n_report()
    groups = {group.name: group for group in report.groups()}
    experts = groups["model.layers.*.mlp.experts.gate_up_proj"]
    assert [row.name for row in experts.rows] == [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)]
    assert experts.nbytes == 2 * 4 * 256 * 64 // 32 * 18
    low, high = experts.errors
    assert 0.07 < low <= high < 0.1
    text = str(report)
    line = next(line for line in text.splitlines() if "experts.gate_up_proj" in line)
    assert line.split()[1:5] == ["2", "q4_0", "4x256x64", f"{experts.nbytes:,}"]
    assert "model.embed_tokens.weight: embeddings and head stay float unless asked for" in text
    assert "model.layers.*.mlp.gate.weight (2): " in text
