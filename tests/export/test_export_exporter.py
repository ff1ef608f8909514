import json
import shutil

import models
import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from transformers import AutoModelForCausalLM

from t2n_hf import T2NConfig
from t2n_hf.contract import OffloadState, SupportsOffloadState, WeightFormat
from t2n_hf.errors import CheckpointNotFoundError, ConfigError, MissingEmittersError, OutputExistsError
from t2n_hf.export import export_nnef
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract

FILES = ["README.md", "config.json", "generation_config.json", "model.nnef.tgz", "t2n_export.json"]


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def formats_in(report):
    reader = ArchiveReader(report.archive)
    labels = [name.removesuffix(".dat") for name in reader.names() if name.endswith(".dat")]
    return {label: reader.header(label).format for label in labels}


def parameter_bytes(model):
    return sum(p.numel() * 4 for p in model.parameters())


def test_a_loaded_model_becomes_a_checked_folder_that_says_what_it_is(tmp_path):
    model = models.m1()
    report = export_nnef(model, tmp_path / "out")
    assert names_in(tmp_path / "out") == FILES
    assert report.check == "passed"
    assert report.max_rel_error is not None
    assert report.max_rel_error < 1e-5
    assert report.archive == tmp_path / "out" / "model.nnef.tgz"
    assert report.weight_bytes == pytest.approx(parameter_bytes(model), rel=0.15)  # headers of a tiny model
    assert report.dense == {}
    assert list(report.seconds)[:2] == ["load", "graph"]
    manifest = ExportManifest.read(tmp_path / "out")
    manifest.verify(tmp_path / "out")
    assert (manifest.task, manifest.dtype, manifest.weights) == ("text-generation", "f32", "none")
    assert manifest.least_tract is not None
    assert manifest.inputs[0] == {"name": "input_ids", "dtype": "i64", "shape": [1, "S"]}
    assert manifest.inputs[1] == {"name": "in_cache_key_0", "dtype": "f32", "shape": [1, 2, "P", 16]}
    assert manifest.outputs[1]["name"] == "out_cache_key_0"
    assert manifest.outputs[1]["shape"][2] in {"P+S", "S+P"}
    assert manifest.symbols == ["S", "P"]
    assert manifest.source == {"id": None, "revision": None}


@pytest.mark.parametrize(
    ("archive_format", "archive"), [("tgz", "model.nnef.tgz"), ("tar", "model.nnef.tar"), ("dir", "model")], ids=str
)
def test_every_format_is_read_by_tract(archive_format, archive, tmp_path):
    report = export_nnef(models.m1(), tmp_path / "out", format=archive_format)
    assert report.check == "passed"
    assert report.archive == tmp_path / "out" / archive
    ExportManifest.read(tmp_path / "out").verify(tmp_path / "out")


def logits(model, ids, past):
    """Logits of the last position in PyTorch, after a past, all at once."""
    whole = torch.cat([past, ids], dim=1)
    with torch.no_grad():
        return model(input_ids=whole).logits[:, -1:].numpy()


@pytest.mark.parametrize("new", [1, 5, 64])
@pytest.mark.parametrize("past", [0, 9])
def test_lengths_that_were_not_traced_equal_pytorch_with_and_without_a_past(new, past, tmp_path_factory, exported_m1):
    model, report = exported_m1
    ids, before = models.prompt(new), models.prompt(9)[:, :past]
    with TractRunner(report.archive) as runner:
        empty = {name: np.zeros((1, 2, 0, 16), np.float32) for name in runner.inputs if name != "input_ids"}
        caches = empty
        if past:
            first = runner.run({"input_ids": before.numpy(), **empty})
            caches = {name: first[name.replace("in_", "out_", 1)] for name in empty}
        got = runner.run({"input_ids": ids.numpy(), **caches})["outputs"]
    np.testing.assert_allclose(got, logits(model, ids, before), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exported_m1(tmp_path_factory):
    model = models.m1()
    return model, export_nnef(model, tmp_path_factory.mktemp("m1") / "out", check=False)


def test_a_model_quantized_on_load_on_disk_and_while_exporting_gives_the_same_bytes(tmp_path):
    source = models.saved(models.m1(), tmp_path)
    config = T2NConfig(weights="q4_0", embeddings="q4_0")
    resident = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    plain = AutoModelForCausalLM.from_pretrained(source)
    options = {"weights": "q4_0", "embeddings": "q4_0"}
    reports = [
        export_nnef(resident, tmp_path / "resident"),
        export_nnef(source, tmp_path / "folder", **options),
        export_nnef(plain, tmp_path / "plain", **options),
    ]
    assert [report.check for report in reports] == ["passed"] * 3
    archives = {report.archive.read_bytes() for report in reports}
    assert len(archives) == 1
    found = formats_in(reports[0])
    assert found["model.embed_tokens.weight"] == "q4_0"
    assert found["model.layers.0.mlp.up_proj.weight"] == "q4_0"
    assert found["model.norm.weight"] == "f32"
    assert ExportManifest.read(tmp_path / "plain").weights == "q4_0"


def test_a_model_that_cannot_be_packed_lists_what_stays_dense_and_why(tmp_path):
    report = export_nnef(models.m9(), tmp_path / "out", weights="q4_0")
    assert report.check == "passed"
    reason = report.dense["model.layers.0.mlp.up_proj.weight"]
    assert "48" in reason
    manifest = ExportManifest.read(tmp_path / "out")
    assert {"name": "model.layers.0.mlp.up_proj.weight", "reason": reason} in list(manifest.dense)
    assert set(formats_in(report).values()) == {"f32"}


def test_a_saved_quantized_model_exports_as_it_is(tmp_path):
    source = models.saved(models.m2(), tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(source, quantization_config=T2NConfig("q4_0"))
    packed.save_pretrained(tmp_path / "packed")
    once = export_nnef(packed, tmp_path / "a", check=False)
    again = export_nnef(tmp_path / "packed", tmp_path / "b", weights="q4_0")
    assert again.check == "passed"
    assert once.archive.read_bytes() == again.archive.read_bytes()
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


@pytest.mark.parametrize(
    ("model", "dtype", "stored"),
    [(models.m1, None, "f32"), (models.m1, "f16", "f16"), (models.m8, None, "f32"), (models.m8, "f16", "f16")],
    ids=["f32", "f32 to f16", "bf16 to f32", "bf16 to f16"],
)
def test_every_dat_file_has_the_dtype_of_the_archive_and_f16_halves_it(model, dtype, stored, tmp_path):
    built = model()
    report = export_nnef(built, tmp_path / "out", dtype=dtype)
    assert report.check == "passed"
    assert report.dtype == stored
    formats = formats_in(report)
    weights = {name: kind for name, kind in formats.items() if name in dict(built.named_parameters())}
    assert set(weights.values()) == {stored}
    headers = 128 * len(formats)
    assert report.weight_bytes - headers == pytest.approx(
        parameter_bytes(built) * (0.5 if stored == "f16" else 1), rel=0.01
    )


@pytest.mark.parametrize("options", [{}, {"weights": "q4_0"}], ids=["dense", "q4_0"])
def test_a_model_that_stores_in_by_out_is_written_as_tract_takes_it(options, tmp_path):
    report = export_nnef(models.m10(), tmp_path / "out", **options)
    assert report.check == "passed"
    formats = formats_in(report)
    assert formats["transformer.h.0.mlp.c_fc.weight"] == ("q4_0" if options else "f32")
    assert "lm_head.weight" not in formats  # tied, and written once


@pytest.mark.parametrize("options", [{}, {"weights": "q4_0"}], ids=["dense", "q4_0"])
@pytest.mark.parametrize("model", [models.m4, models.m4_qwen3], ids=["mixtral", "qwen3_moe"])
def test_experts_are_written_once(model, options, tmp_path):
    built = model()
    report = export_nnef(built, tmp_path / "out", **options)
    assert report.check == "passed"
    if not options:
        written = report.weight_bytes - 128 * sum(count for count, _ in report.formats.values())
        assert written == pytest.approx(parameter_bytes(built), rel=0.01)


@pytest.mark.parametrize("model", [models.m3, models.m5, models.m6], ids=["head_dim", "sliding window", "longrope"])
def test_models_with_peculiar_attention_pass_their_check(model, tmp_path):
    assert export_nnef(model(), tmp_path / "out").check == "passed"


@pytest.mark.parametrize("capture", ["pieces", "whole"])
@pytest.mark.parametrize("flat", [False, True], ids=["fragments", "flat"])
def test_every_way_of_capturing_and_writing_agrees_with_pytorch(capture, flat, tmp_path):
    assert export_nnef(models.m1(), tmp_path / "out", capture=capture, flat=flat).check == "passed"


def test_all_logits_gives_those_of_every_position(tmp_path):
    report = export_nnef(models.m1(), tmp_path / "out", all_logits=True)
    assert report.check == "passed"
    assert ExportManifest.read(tmp_path / "out").outputs[0]["shape"] == [1, "S", 256]


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_model_under_accelerates_own_offloading_is_refused_before_tracing_with_what_to_do(offload, tmp_path):
    model = models.m1()
    if offload == "cpu":
        cpu_offload(model, execution_device="cpu")
    else:
        disk_offload(model, str(tmp_path / "offload"), execution_device="cpu")
    with pytest.raises(ConfigError, match="accelerate's own offloading") as error:
        export_nnef(model, tmp_path / "out")
    assert "T2NConfig(weights='none')" in str(error.value)
    assert not (tmp_path / "out").exists()


class Gathers(nn.Module):
    """Rows at constant indices, and a product."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 32)
        self.out = nn.Linear(32, 4)
        self.register_buffer("ids", torch.tensor([1, 7, 3]))

    def forward(self, x):
        return self.out(self.table(self.ids) + x)


@pytest.mark.parametrize("options", [{}, {"weights": "q4_0", "embeddings": "q4_0"}], ids=["dense", "q4_0"])
def test_rows_at_constant_indices_are_those_of_the_real_table(options, tmp_path):
    module = Gathers()
    count = torch.export.Dim("N")
    args = (torch.randn(2, 3, 32),)
    report = export_nnef(module, tmp_path / "out", example_args=args, dynamic_shapes=({0: count},), **options)
    assert report.check == "passed"
    manifest = ExportManifest.read(tmp_path / "out")
    assert manifest.inputs == [{"name": "x", "dtype": "f32", "shape": ["N", 3, 32]}]
    assert manifest.symbols == ["N"]
    if not options:
        x = torch.randn(5, 3, 32)
        with TractRunner(report.archive) as runner:
            got = runner.run({"x": x.numpy()})["output"]
        np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_module_in_training_is_exported_in_evaluation_mode_and_left_as_it_was(tmp_path):
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).train()
    report = export_nnef(module, tmp_path / "out", example_args=(torch.randn(3, 8),), input_names=["x"])
    assert report.check == "passed"
    assert module.training
    assert module[1].training


def test_a_module_without_examples_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Linear is no transformers model.*example_args"):
        export_nnef(nn.Linear(2, 2), tmp_path / "out")


def test_shapes_and_names_without_examples_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="input_names go with example_args"):
        export_nnef(nn.Linear(2, 2), tmp_path / "out", input_names=["x"])


def test_options_of_loading_are_refused_for_a_loaded_model(tmp_path):
    with pytest.raises(ConfigError, match="device_map, revision: for loading a checkpoint"):
        export_nnef(models.m1(), tmp_path / "out", device_map="auto", revision="main")


class Doubled(OpaqueTensor, SupportsOffloadState):
    """A quantized class of somebody else, without a block format of tract."""

    OFFLOAD_STATE_TAG = "tests_export.doubled.v1"

    @classmethod
    def over(cls, half):
        result = cls._shell(half.shape, half.dtype, half.device)
        result.half = half
        return result

    def _parts(self):
        return {"half": self.half}

    def _rebuild(self, parts, dtype):
        return self.over(parts["half"].to(dtype))

    def _to_base_tensor(self):
        return self.half * 2

    def to_offload_state(self):
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors={"half": self.half}, meta={})

    @classmethod
    def from_offload_state(cls, state, target_device=None):
        return cls.over(state["tensors"]["half"])


@pytest.mark.parametrize("asked", [None, "q4_0"])
def test_a_class_without_a_block_format_is_dense_and_listed_or_quantized_anew_when_asked(asked, tmp_path):
    module = nn.Linear(64, 8)
    module.weight = nn.Parameter(Doubled.over(torch.randn(8, 64)), requires_grad=False)
    report = export_nnef(module, tmp_path / "out", example_args=(torch.randn(2, 64),), weights=asked)
    assert report.check == "passed"
    assert formats_in(report)["weight"] == (asked or "f32")
    reason = {"weight": "tests_export.doubled.v1 has no block format that tract reads"}
    assert report.dense == ({} if asked else reason)


def test_a_check_that_memory_is_too_short_for_is_skipped_with_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr("t2n_hf.export.verify.available_bytes", lambda: 1000)
    report = export_nnef(models.m1(), tmp_path / "out")
    assert report.check.startswith("skipped: short of memory")
    assert report.max_abs_error is None
    assert ExportManifest.read(tmp_path / "out").least_tract is None
    assert "short of memory" in str(report)


class Foreign(OpaqueTensor, WeightFormat):
    OFFLOAD_STATE_TAG = "tests_export.foreign.v1"


def test_a_class_that_tract_cannot_read_is_refused_for_a_loaded_model(tmp_path):
    with pytest.raises(ConfigError, match="weights='foreign' is no block format that tract reads"):
        export_nnef(models.m1(), tmp_path / "out", weights="foreign")


def test_operators_without_an_emitter_are_all_listed_with_their_modules_before_anything_is_written(tmp_path):
    class Solver(nn.Module):
        def forward(self, x):
            return torch.linalg.svd(x).S, torch.fft.fft(x).real

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.solver = Solver()

        def forward(self, x):
            return self.solver(x)

    with pytest.raises(MissingEmittersError) as error:
        export_nnef(Outer(), tmp_path / "out", example_args=(torch.randn(3, 3),))
    for part in ("svd", "fft", "solver"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused_before_any_work_and_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="exists already"):
        export_nnef("no/such-model", tmp_path / "out")
    assert names_in(tmp_path / "out") == ["mine.txt"]


def test_overwriting_replaces_an_export_and_nothing_else(tmp_path):
    export_nnef(models.m1(), tmp_path / "out", check=False)
    (tmp_path / "out" / "left.txt").write_text("x")
    export_nnef(models.m2(), tmp_path / "out", check=False, overwrite=True, format="tar")
    assert "model.nnef.tar" in names_in(tmp_path / "out")
    assert not {"left.txt", "model.nnef.tgz"} & set(names_in(tmp_path / "out"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"holds no t2n_export\.json"):
        export_nnef(models.m1(), tmp_path / "other", check=False, overwrite=True)
    assert names_in(tmp_path / "other") == ["mine.txt"]


@pytest.mark.parametrize("what", ["nothing", "no config", "no weights"])
def test_a_folder_that_is_no_checkpoint_is_refused(what, tmp_path):
    source = tmp_path / "source"
    if what != "nothing":
        models.saved(models.m1(), tmp_path).rename(source)
        for pattern in ("config.json",) if what == "no config" else ("*.safetensors",):
            for path in source.glob(pattern):
                path.unlink()
    with pytest.raises(CheckpointNotFoundError):
        export_nnef(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_export_runs_when_its_source_is_gone(tmp_path):
    source = models.saved(models.m1(), tmp_path)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "tokenizer_config.json").write_text(json.dumps({"name_or_path": str(source), "eos_token": "</s>"}))
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\n---\n# secret plans")
    (source / "LICENSE").write_text("free")
    report = export_nnef(source, tmp_path / "out")
    shutil.rmtree(source)
    assert {"tokenizer.json", "tokenizer_config.json", "LICENSE"} <= set(names_in(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    assert "secret plans" not in card
    with TractRunner(report.archive) as runner:
        assert "outputs" in runner.outputs


def test_progress_tells_bytes_until_all_are_written(tmp_path):
    told = []
    report = export_nnef(models.m1(), tmp_path / "out", check=False, on_progress=lambda *now: told.append(now))
    assert told[-1] == (report.weight_bytes, report.weight_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
