import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.errors import FormatError, OutputExistsError, UnknownTagError
from t2n_hf.hf.hooks import leases_of, offloaded_parameters
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

DISK = {"": "disk"}
REFERENCE_NOTE = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def load(model, folder, quantization=None, **options):
    options.setdefault("dtype", "auto")
    return type(model).from_pretrained(folder, quantization_config=quantization, **options)


def logits(model, length=12):
    with torch.no_grad():
        return model(models.prompt(length)).logits


def kinds(model):
    return {name: type(p).__name__ for name, p in model.named_parameters(remove_duplicate=False)}


def content(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["m1", "m2", "m4", "m4_qwen3", "m5", "m6", "m7", "m8", "m10"])
@REFERENCE_NOTE
def test_a_saved_model_comes_back_with_its_classes_bytes_and_logits(name, tmp_path):
    source = getattr(models, name)()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    first = models.saved(packed, tmp_path)
    again = load(source, first)
    assert kinds(again) == kinds(packed)
    assert torch.equal(logits(again), logits(packed))
    assert content(models.saved(again, tmp_path)) == content(first)
    on_disk = load(source, first, device_map=DISK)
    assert torch.equal(logits(on_disk), logits(packed))
    assert content(models.saved(on_disk, tmp_path)) == content(first)


@pytest.mark.parametrize("name", ["m1", "m4"])
def test_a_model_quantized_onto_disk_saves_the_same_bytes(name, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path)
    resident, on_disk = load(source, folder, T2NConfig()), load(source, folder, T2NConfig(), device_map=DISK)
    assert content(models.saved(on_disk, tmp_path)) == content(models.saved(resident, tmp_path))


def test_a_packed_checkpoint_on_disk_is_read_where_it_is(tmp_path):
    source = models.m1()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path)
    model = load(source, first, T2NConfig(max_resident_bytes=70_000), device_map=DISK)
    pool = leases_of(model).pool
    assert pool.max_cached_bytes == 70_000
    expected = logits(load(source, first))
    assert torch.equal(logits(model), expected)
    assert 0 < pool.resident_bytes <= 70_000
    up = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(up, OffloadedTensor)
    assert up.inner_class is QTensorTractScaleOnly
    assert up.nbytes_loaded == 128 * 64 // 32 * 18
    assert all(p.dim() < 2 or isinstance(p, OffloadedTensor) for p in model.parameters())


def test_part_of_a_packed_checkpoint_can_stay_on_disk(tmp_path):
    source = models.m2()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path, max_shard_size="40KB")
    model = load(source, first, device_map={"model.layers.0": "disk", "lm_head": "disk", "": "cpu"})
    assert {name.rpartition(".")[0] for name in offloaded_parameters(model)} == {
        "lm_head",
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
        *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")),
    }
    assert torch.equal(logits(model), logits(load(source, first)))


def test_fast_on_disk_computes_like_fast_in_memory(tmp_path):
    source = models.m1()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig(compute="fast")), tmp_path)
    resident, on_disk = load(source, first), load(source, first, device_map=DISK)
    assert resident.model.layers[0].mlp.up_proj.weight.compute == "fast"
    assert torch.equal(logits(on_disk), logits(resident))


def test_a_packed_checkpoint_acts_in_the_dtype_that_is_asked_for(tmp_path):
    source = models.m1()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path)
    for options in ({}, {"device_map": DISK}):
        model = load(source, first, dtype=torch.bfloat16, **options)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(logits(model).float(), logits(load(source, first)), atol=0.1, rtol=0.1)


def test_config_json_says_nothing_about_the_machine(tmp_path):
    source = models.m1()
    options = {"max_resident_bytes": 12_345_678, "spill_dir": tmp_path}
    packed = load(source, models.saved(source, tmp_path), T2NConfig(**options), device_map=DISK)
    text = (models.saved(packed, tmp_path) / "config.json").read_text()
    assert "12345678" not in text
    assert str(tmp_path) not in text
    stored = json.loads(text)["quantization_config"]
    assert stored["quant_method"] == "t2n"
    assert stored["tensors"]["model.layers.*.mlp.up_proj.weight"]["tag"] == "t2n_hf.q4_0.v1"


@pytest.mark.parametrize(
    ("options", "packed_table"),
    [({}, False), ({"embeddings": "q4_0"}, True), ({"lm_head": "q4_0"}, True), ({"embeddings": "none"}, False)],
    ids=["default", "embeddings", "head", "none"],
)
def test_a_tied_table_is_stored_once(options, packed_table, tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(**options))
    first = models.saved(packed, tmp_path)
    names = set(CheckpointIndex.open(first))
    table = "model.embed_tokens.weight"
    assert {n for n in names if "embed_tokens" in n or "lm_head" in n} == {f"{table}_q4_0" if packed_table else table}
    assert json.loads((first / "config.json").read_text())["tie_word_embeddings"] is True
    again = load(source, first)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(packed))


@pytest.mark.parametrize("weights", ["q4_0", "none"])
def test_a_model_whose_checkpoints_merge_weights_comes_back(weights, tmp_path):
    import transformers as hf

    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = hf.NomicBertConfig(**shape, num_attention_heads=4)
    source = models.build(hf.NomicBertModel, config)

    def hidden(model):
        with torch.no_grad():
            return model(models.prompt())[0]

    folder = models.saved(source, tmp_path)
    assert any("Wqkv" in name for name in CheckpointIndex.open(folder))
    model = load(source, folder, T2NConfig(weights, modules_to_not_convert=[]), device_map=DISK)
    if weights == "none":
        assert torch.equal(hidden(model), hidden(source))
        return
    assert isinstance(model.layers[0].self_attn.q_proj.weight, OffloadedTensor)
    assert model.layers[0].self_attn.q_proj.weight.inner_class is QTensorTractScaleOnly
    first = models.saved(model, tmp_path)
    for options in ({}, {"device_map": DISK}):
        again = load(source, first, **options)
        assert torch.equal(hidden(again), hidden(model))
        assert content(models.saved(again, tmp_path)) == content(first)


def test_untied_tables_are_stored_as_chosen(tmp_path):
    source = models.m2()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(lm_head="q4_0"))
    names = set(CheckpointIndex.open(models.saved(packed, tmp_path)))
    assert {"model.embed_tokens.weight", "lm_head.weight_q4_0"} <= names
    assert "lm_head.weight" not in names


def test_a_base_model_reads_the_checkpoint_of_a_model_with_a_head(tmp_path):
    import transformers as hf

    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    base = hf.LlamaModel.from_pretrained(models.saved(packed, tmp_path), dtype="auto")
    with torch.no_grad():
        assert torch.equal(base(models.prompt())[0], packed.model(models.prompt())[0])
    assert isinstance(base.layers[0].mlp.up_proj.weight, QTensorTractScaleOnly)


def test_a_model_without_packed_weights_is_saved_plainly(tmp_path):
    source = models.m4()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none"), device_map=DISK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = models.saved(model, tmp_path)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert not (plain / "README.md").exists()
    assert (plain / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert model.config.quantization_config.weights == "none"


def test_machine_options_hold_for_a_packed_checkpoint_without_a_warning(tmp_path):
    source = models.m1()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig(embeddings="q4_0")), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(source, first, T2NConfig(max_resident_bytes=99_999, compute="fast"), device_map=DISK)
    config = model.hf_quantizer.quantization_config
    assert (config.max_resident_bytes, config.compute, config.embeddings) == (99_999, "fast", "q4_0")
    assert leases_of(model).pool.max_cached_bytes == 99_999


def test_other_options_for_a_packed_checkpoint_are_ignored_with_a_warning(tmp_path):
    source = models.m1()
    first = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path)
    with pytest.warns(UserWarning, match=r"quantized already.*weights='none' is ignored"):
        model = load(source, first, T2NConfig("none"))
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, QTensorTractScaleOnly)


def test_the_folder_says_what_it_needs(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    folder = models.saved(packed, tmp_path)
    card = (folder / "README.md").read_text()
    assert "import t2n_hf" in card
    assert str(tmp_path) not in card
    packed.save_pretrained(folder)
    assert (folder / "README.md").read_text() == card


def test_a_card_that_is_there_is_kept(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("# My model\n")
    packed.save_pretrained(folder)
    text = (folder / "README.md").read_text()
    assert text.startswith("# My model\n")
    assert "import t2n_hf" in text


@pytest.mark.parametrize("device_map", [None, DISK], ids=["memory", "disk"])
def test_the_checkpoint_that_is_read_from_is_not_overwritten(device_map, tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    before = content(folder)
    model = load(source, folder, T2NConfig(), device_map=device_map)
    with pytest.raises(OutputExistsError, match="another folder"):
        model.save_pretrained(folder)
    assert content(folder) == before


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_the_checkpoint_that_is_read_from_is_not_overwritten_through_links(link, tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        getattr(linked / file.name, link)(file)
    before = content(folder)
    model = load(source, folder, T2NConfig(), device_map=DISK)
    with pytest.raises(OutputExistsError, match="another folder"):
        model.save_pretrained(linked)
    assert content(folder) == before


def test_a_tag_that_nobody_declares_is_named(tmp_path):
    source = models.m1()
    folder = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("t2n_hf.q4_0.v1", "elsewhere.q3.v1"))
    with pytest.raises(UnknownTagError, match=r"elsewhere\.q3\.v1.*t2n_hf\.q4_0\.v1.*pip install elsewhere"):
        load(source, folder)


def test_a_config_that_does_not_fit_the_files_is_refused(tmp_path):
    source = models.m1()
    folder = models.saved(load(source, models.saved(source, tmp_path), T2NConfig()), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["tensors"]["model.layers.*.mlp.up_proj.weight"]["parts"] = ["q4_0", "more"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"up_proj\.weight.*has parts q4_0.*says parts q4_0, more"):
        load(source, folder)


def test_without_the_import_transformers_starts_from_random_weights_and_says_so(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    folder = models.saved(packed, tmp_path)
    script = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(type(model.model.layers[0].mlp.up_proj.weight).__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert "Unknown quantization type, got t2n" in ran.stderr
    assert "up_proj.weight" in ran.stderr
    assert "MISSING" in ran.stderr
    assert ran.stdout.strip() == "Parameter"
    assert "Unknown quantization type, got t2n" in (folder / "README.md").read_text()
    imported = f"import t2n_hf\n{script}"
    ran = subprocess.run([sys.executable, "-c", imported, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "QTensorTractScaleOnly"
    assert "MISSING" not in ran.stderr


def test_saving_shards_keeps_every_part(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(embeddings="q4_0"))
    folder = models.saved(packed, tmp_path, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    again = load(source, folder)
    assert torch.equal(logits(again), logits(packed))
    assert all(p.dim() < 2 or isinstance(p, OpaqueTensor) for p in again.parameters())


def test_threads_that_save_at_once_write_the_same_and_hear_no_warning(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    model.save_pretrained(tmp_path / "alone")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: model.save_pretrained(tmp_path / str(number)), range(12)))
    expected = content(tmp_path / "alone")
    assert b"quantization_config" not in expected["config.json"]
    assert all(content(tmp_path / str(number)) == expected for number in range(12))
