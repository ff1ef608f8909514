import models
import pytest
import torch

from t2n_hf import T2NConfig, materialize
from t2n_hf.hf.report import coverage_of
from t2n_hf.hf.weights import held_nbytes, tied_names, weights_of


def load(model, folder, quantization=None, **options):
    return type(model).from_pretrained(folder, dtype="auto", quantization_config=quantization, **options)


@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["memory", "disk"])
@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
def test_every_weight_is_listed_with_its_bytes(name, device_map, tmp_path):
    source = getattr(models, name)()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(), device_map=device_map)
    report = coverage_of(packed)
    assert [row.name for row in report.rows] == [n for n, _ in packed.named_parameters()]
    for row in report.rows:
        values = source.get_parameter(row.name).numel()
        assert row.nbytes == (values // 32 * 18 if row.quantized else values * 4), row
        assert row.format == ("q4_0" if row.quantized else "f32")
        assert row.quantized or row.reason
    assert report.share > 0.9
    assert report.nbytes == sum(row.nbytes for row in report.rows)
    assert {row.where for row in report.rows if len(row.shape) > 1} == {"disk" if device_map else "memory"}


@pytest.mark.parametrize("make", [models.m4, models.m4_qwen3], ids=["mixtral", "qwen3_moe"])
def test_experts_count_and_are_quantized(make, tmp_path):
    source = make()
    report = coverage_of(load(source, models.saved(source, tmp_path), T2NConfig()))
    experts = [row for row in report.rows if len(row.shape) == 3]
    assert len(experts) == 4
    assert all(row.quantized for row in experts)


def test_what_stayed_float_says_why(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(modules_to_not_convert=["layers.1.mlp"]))
    dense = coverage_of(packed).dense
    assert dense["model.embed_tokens.weight"] == "embeddings and head stay float unless asked for"
    assert dense["model.layers.1.mlp.up_proj.weight"] == "modules_to_not_convert names 'layers.1.mlp'"
    assert len(dense) == 4
    assert "layers.1.mlp" in str(coverage_of(packed))


def test_a_packed_checkpoint_gives_the_same_report(tmp_path):
    source = models.m4()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(lm_head="q4_0"))
    again = load(source, models.saved(packed, tmp_path))
    assert coverage_of(again) == coverage_of(packed)


def test_a_plain_model_has_a_report_too():
    report = coverage_of(models.m1())
    assert report.by_format() == {"f32": (20, sum(p.nbytes for p in models.m1().parameters()))}
    assert report.share == 0


def test_little_coverage_is_warned_about(tmp_path):
    source = models.m9()
    with pytest.warns(UserWarning, match=r"only 0% .*its last axis has 48 values.*model.t2n_report\(\)"):
        load(source, models.saved(source, tmp_path), T2NConfig())


def test_tied_names_lead_to_the_one_that_is_saved():
    model = models.m1()
    names = tied_names(model)
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert set(names) == set(weights_of(model))
    assert weights_of(model)["lm_head.weight"] is weights_of(model)["model.embed_tokens.weight"]
    assert all(name == kept for name, kept in tied_names(models.m2()).items())
    assert held_nbytes(model.lm_head.weight) == 256 * 64 * 4


def test_a_loaded_model_reports_for_itself_until_it_is_materialized(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    assert str(packed.t2n_report()) == str(coverage_of(packed))
    assert "q4_0" in packed.t2n_report().by_format()
    assert not hasattr(materialize(packed), "t2n_report")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_weights_of_types_that_tract_has_not_are_listed_by_torch_s_name(dtype):
    module = torch.nn.Linear(64, 64, bias=False)
    module.codes = torch.nn.Parameter(torch.zeros(8, 64).to(dtype), requires_grad=False)
    assert coverage_of(module).by_format() == {
        "f32": (1, 64 * 64 * 4),
        str(dtype).removeprefix("torch."): (1, 8 * 64 * dtype.itemsize),
    }
