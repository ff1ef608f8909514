"""Quantizing a folder gives, byte for byte, what loading with a T2NConfig and saving gives."""

import json

import models
import pytest
import safetensors.torch
import torch
from quantize_cases import Halves, content, rewritten, saved_packed

import t2n_hf
from t2n_hf import Importance, T2NConfig, quantize_checkpoint
from t2n_hf.hf.hooks import offloaded_parameters
from t2n_hf.registry import list_plugins
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

DISK = {"": "disk"}
KINDS = ["m1", "m2", "m3", "m4", "m4_qwen3", "m5", "m6", "m7", "m8", "m10"]
REFERENCE_NOTE = pytest.mark.filterwarnings("ignore:.*falling back to its reference")
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the values that could be quantized are")


def both_ways(source, folder, checkpoint=None, quantization=None, **options):
    """Folders made by quantize_checkpoint and by load and save."""
    checkpoint = checkpoint or models.saved(source, folder)
    expected = saved_packed(source, checkpoint, folder, quantization, **options)
    quantize_checkpoint(checkpoint, folder / "out", config=quantization, **options)
    return folder / "out", expected


@pytest.mark.parametrize("name", KINDS)
@REFERENCE_NOTE
def test_the_folder_is_that_of_load_and_save(name, tmp_path):
    out, expected = both_ways(getattr(models, name)(), tmp_path)
    assert content(out) == content(expected)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m1", {"embeddings": "q4_0"}),
        ("m1", {"lm_head": "q4_0"}),
        ("m2", {"lm_head": "q4_0"}),
        ("m2", {"embeddings": "q4_0", "lm_head": "none"}),
        ("m2", {"modules_to_not_convert": ["mlp"]}),
        ("m2", {"compute": "fast", "max_resident_bytes": 10_000_000}),
        ("m5", {"embeddings": "q4_0", "weights": "none"}),
        ("m10", {"embeddings": "q4_0", "modules_to_not_convert": []}),
    ],
)
def test_options_mean_what_they_mean_for_from_pretrained(name, options, tmp_path):
    out, expected = both_ways(getattr(models, name)(), tmp_path, quantization=T2NConfig(**options))
    assert content(out) == content(expected)


@pytest.mark.parametrize("weights", sorted(row.short for row in list_plugins() if row.quantizes and row.version))
@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
def test_any_installed_class_will_do(name, weights, tmp_path):
    out, expected = both_ways(getattr(models, name)(), tmp_path, quantization=T2NConfig(weights))
    assert content(out) == content(expected)


@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
def test_a_class_that_knows_no_meta_tensors_and_no_rows_will_do(name, tmp_path):
    out, expected = both_ways(getattr(models, name)(), tmp_path, quantization=T2NConfig("noted_halves"))
    assert content(out) == content(expected)


@pytest.mark.parametrize(
    ("name", "stored", "asked"),
    [
        ("m1", torch.float32, torch.bfloat16),
        ("m4", torch.float32, torch.bfloat16),
        ("m10", torch.float32, torch.float16),
        ("m8", torch.bfloat16, torch.float32),
        ("m2", torch.float16, torch.bfloat16),
    ],
)
def test_a_dtype_is_rounded_to_as_the_loader_rounds(name, stored, asked, tmp_path):
    source = getattr(models, name)()
    checkpoint = models.saved(source, tmp_path)
    rewritten(checkpoint, lambda tensors: {key: value.to(stored) for key, value in tensors.items()})
    out, expected = both_ways(source, tmp_path, checkpoint, dtype=asked)
    assert content(out) == content(expected)


def test_weights_of_several_dtypes_become_what_the_loader_makes_of_them(tmp_path):
    source = models.m8()
    checkpoint = rewritten(
        models.saved(source, tmp_path),
        lambda tensors: {k: v.float() if "norm" in k or "up_proj" in k else v for k, v in tensors.items()},
    )
    out, expected = both_ways(source, tmp_path, checkpoint)
    assert content(out) == content(expected)


@pytest.mark.parametrize("size", ["20KB", 1000])
def test_shards_are_read_and_written(size, tmp_path):
    source = models.m2()
    checkpoint = models.saved(source, tmp_path, max_shard_size="40KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 3
    out, expected = both_ways(source, tmp_path, checkpoint, max_shard_size=size)
    assert content(out) == content(expected)
    assert (out / "model.safetensors.index.json").is_file()


def test_a_rule_that_splits_stored_weights_is_followed(tmp_path):
    import transformers as hf

    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    source = models.build(hf.NomicBertModel, hf.NomicBertConfig(**shape, num_attention_heads=4))
    checkpoint = models.saved(source, tmp_path)
    assert any("Wqkv" in name for name in CheckpointIndex.open(checkpoint))
    out, expected = both_ways(source, tmp_path, checkpoint, T2NConfig(modules_to_not_convert=[]))
    assert content(out) == content(expected)
    assert "layers.0.self_attn.q_proj.weight_q4_0" in CheckpointIndex.open(out)


@pytest.mark.parametrize("case", ["both", "head_only", "different"])
def test_tied_tables_are_settled_as_the_loader_settles_them(case, tmp_path):
    def change(tensors):
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table + 1 if case == "different" else table.clone()
        if case == "head_only":
            del tensors["model.embed_tokens.weight"]

    source = models.m1()
    checkpoint = rewritten(models.saved(source, tmp_path), change)
    out, expected = both_ways(source, tmp_path, checkpoint)
    assert content(out) == content(expected)
    assert ("lm_head.weight" in CheckpointIndex.open(out)) == (case == "different")


@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
def test_the_folder_loads_in_memory_and_on_disk_with_the_logits_of_the_other_way(name, tmp_path):
    source = getattr(models, name)()
    checkpoint = models.saved(source, tmp_path)
    quantize_checkpoint(checkpoint, tmp_path / "out")
    direct = type(source).from_pretrained(checkpoint, quantization_config=T2NConfig(), dtype="auto")
    with torch.no_grad():
        expected = direct(models.prompt()).logits
        for options in ({}, {"device_map": DISK}):
            model = type(source).from_pretrained(tmp_path / "out", dtype="auto", **options)
            assert torch.equal(model(models.prompt()).logits, expected)
    assert offloaded_parameters(model)


def test_tokenizer_licence_and_card_come_along(tmp_path):
    source = models.m1()
    checkpoint = models.saved(source, tmp_path)
    (checkpoint / "tokenizer.json").write_text('{"a": 1}')
    (checkpoint / "LICENSE.txt").write_text("free")
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tools.jinja").write_text("x")
    (checkpoint / "training_log.txt").write_text("not this")
    quantize_checkpoint(checkpoint, tmp_path / "out")
    found = content(tmp_path / "out")
    assert found["tokenizer.json"] == b'{"a": 1}'
    assert found["LICENSE.txt"] == b"free"
    assert found["additional_chat_templates/tools.jinja"] == b"x"
    assert found["README.md"].decode().startswith("---\nlicense: mit\n---\n\n# Mine\n")
    assert "import t2n_hf" in found["README.md"].decode()
    assert "training_log.txt" not in found


def test_nothing_in_the_folder_names_the_machine(tmp_path):
    checkpoint = models.saved(models.m1(), tmp_path)
    quantize_checkpoint(checkpoint, tmp_path / "out")
    assert not [name for name, data in content(tmp_path / "out").items() if str(tmp_path).encode() in data]


def test_the_report_says_what_became_of_each_weight(tmp_path):
    source = models.m2()
    checkpoint = models.saved(source, tmp_path)
    report = quantize_checkpoint(checkpoint, tmp_path / "out")
    stored = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert report.before == {"f32": sum(value.nbytes for value in stored.values())}
    assert report.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    rows = {row.name: row for row in report.coverage.rows}
    assert set(rows) == set(stored)
    up = rows["model.layers.0.mlp.up_proj.weight"]
    assert (up.format, up.nbytes, up.module, up.quantized) == ("q4_0", 128 * 64 // 32 * 18, "Linear", True)
    assert rows["lm_head.weight"].reason.startswith("embeddings and head stay float")
    text = str(report)
    rows = [row for row in report.coverage.rows if row.quantized]
    read = sum(stored[row.name].nbytes for row in rows)
    assert f"14 weights {read:>16,} -> {sum(row.nbytes for row in rows):>15,} bytes, relative error 0.0" in text
    assert "stays float: 2 x embeddings and head" in text
    json.dumps(report.to_dict())


def test_the_error_of_a_weight_is_that_of_its_values(tmp_path):
    source = models.m2()
    report = quantize_checkpoint(models.saved(source, tmp_path), tmp_path / "out")
    model = type(source).from_pretrained(tmp_path / "out", dtype="auto")
    assert len(report.errors) == 14
    for name, error in report.errors.items():
        packed, true = model.get_parameter(name), source.get_parameter(name).detach()
        assert isinstance(packed, QTensorTractScaleOnly)
        whole = float((packed.to_base_tensor() - true).norm() / true.norm())
        assert error == pytest.approx(whole, rel=0.1)


def test_importance_reaches_the_class_by_parameter_name(tmp_path):
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    importance = {name: torch.linspace(0, 1, 64) + i for i, name in enumerate(names)}
    importance.update({"elsewhere.weight": torch.ones(3), "model.norm.weight": torch.ones(3)})  # not used
    checkpoint = models.saved(models.m2(), tmp_path)
    Importance(importance).save(tmp_path / "importance.safetensors")
    for index, given in enumerate((importance, tmp_path / "importance.safetensors")):
        Halves.given.clear()
        quantize_checkpoint(checkpoint, tmp_path / f"out{index}", weights="noted_halves", importance=given)
        assert {name for name, value in Halves.given.items() if value is not None} == set(names)
        assert all(torch.equal(Halves.given[name], importance[name]) for name in names)


@pytest.mark.parametrize("name", ["m1", "m4", "m10"])
@pytest.mark.parametrize("each_expert", [False, True])
def test_importance_does_what_it_does_for_from_pretrained(name, each_expert, tmp_path):
    source = getattr(models, name)()
    checkpoint = models.saved(source, tmp_path)
    generator = torch.Generator().manual_seed(5)
    values = {}
    for row in quantize_checkpoint(checkpoint, tmp_path / "plain").coverage.rows:
        if row.quantized:
            channels = row.shape[-2 if row.module == "Conv1D" else -1]
            shape = (row.shape[0], channels) if each_expert and len(row.shape) > 2 else (channels,)
            values[row.name] = torch.rand(shape, generator=generator) ** 4
    Importance(values).save(tmp_path / "importance.safetensors")
    quantization = T2NConfig(importance=tmp_path / "importance.safetensors")
    out, expected = both_ways(source, tmp_path, checkpoint, quantization)
    assert content(out) == content(expected)
    assert content(out)["model.safetensors"] != content(tmp_path / "plain")["model.safetensors"]
    quantize_checkpoint(checkpoint, tmp_path / "given", importance=values)
    assert content(tmp_path / "given") == content(out)


def test_importance_is_found_under_any_name_of_a_tied_table(tmp_path):
    checkpoint = models.saved(models.m1(), tmp_path)
    Halves.given.clear()
    importance = {"lm_head.weight": torch.ones(64)}
    quantize_checkpoint(
        checkpoint, tmp_path / "out", weights="noted_halves", lm_head="noted_halves", importance=importance
    )
    assert torch.equal(Halves.given["model.embed_tokens.weight"], importance["lm_head.weight"])


def test_little_coverage_is_warned_about(tmp_path):
    checkpoint = models.saved(models.m9(intermediate_size=96, num_hidden_layers=1), tmp_path)
    with pytest.warns(UserWarning, match=r"only \d+% of the values that could be quantized are: its last axis has 48"):
        quantize_checkpoint(checkpoint, tmp_path / "out")


def test_a_dry_run_tells_all_and_writes_nothing(tmp_path):
    checkpoint = models.saved(models.m2(), tmp_path)
    planned = quantize_checkpoint(checkpoint, tmp_path / "out", dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name]
    done = quantize_checkpoint(checkpoint, tmp_path / "out")
    assert planned.dry_run
    assert planned.coverage == done.coverage
    assert (planned.before, planned.bytes_after, planned.files) == (done.before, done.bytes_after, done.files)
    assert done.bytes_after <= planned.disk_needed <= done.bytes_after + (2 << 20)
    assert "would be quantized" in str(planned)
    assert "disk: " in str(planned)


def test_progress_counts_the_bytes_that_are_read(tmp_path):
    seen = []
    checkpoint = models.saved(models.m4(), tmp_path)
    report = quantize_checkpoint(
        checkpoint, tmp_path / "out", on_progress=lambda done, total: seen.append((done, total))
    )
    assert [total for _, total in seen] == [report.bytes_before] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == report.bytes_before


def test_an_older_output_is_replaced_when_asked_for(tmp_path):
    checkpoint = models.saved(models.m1(), tmp_path)
    quantize_checkpoint(checkpoint, tmp_path / "out", embeddings="q4_0")
    quantize_checkpoint(checkpoint, tmp_path / "out", overwrite=True)
    quantize_checkpoint(checkpoint, tmp_path / "again")
    assert content(tmp_path / "out") == content(tmp_path / "again")


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2_bf16", "minilm"])
def test_real_models_become_what_load_and_save_make_of_them(name, tmp_path, request):
    import transformers as hf

    checkpoint = request.getfixturevalue(name)
    kind = hf.LlamaForCausalLM if name == "smollm2_bf16" else hf.BertModel
    model = kind.from_pretrained(checkpoint, quantization_config=T2NConfig(), dtype="auto")
    model.save_pretrained(tmp_path / "expected")
    t2n_hf.quantize_checkpoint(checkpoint, tmp_path / "out")
    found, expected = content(tmp_path / "out"), content(tmp_path / "expected")
    assert {name: found[name] for name in expected if name != "README.md"} == {
        name: data for name, data in expected.items() if name != "README.md"
    }
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(found)
