import importlib.util
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import models
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from t2n_hf import T2NConfig
from t2n_hf.errors import CheckpointNotFoundError, ConfigError, FormatError, StorageError, T2NError
from t2n_hf.hf.loading import check_checkpoint, checkpoint_folder, load_checkpoint
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly


def logits(model, length=12):
    with torch.no_grad():
        return model(models.prompt(length)).logits


def test_a_folder_is_opened_without_reading_its_weights(tmp_path):
    source = models.m1()
    model = load_checkpoint(models.saved(source, tmp_path))
    assert isinstance(model, hf.LlamaForCausalLM)
    assert all(p.dim() < 2 or isinstance(p, OffloadedTensor) for p in model.parameters())
    assert model.get_memory_footprint(return_buffers=False) == 5 * 64 * 4  # the norms
    assert torch.equal(logits(model), logits(source))


def test_the_dtype_of_the_checkpoint_is_kept_unless_another_is_asked_for(tmp_path):
    folder = models.saved(models.m8(), tmp_path)
    assert load_checkpoint(folder).dtype == torch.bfloat16
    assert load_checkpoint(folder, dtype=torch.float32).dtype == torch.float32


def test_weights_can_be_quantized_on_the_way(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    model = load_checkpoint(folder, weights="q4_0", embeddings="q4_0")
    assert model.lm_head.weight.inner_class is QTensorTractScaleOnly
    assert model.model.layers[0].mlp.up_proj.weight.inner_class is QTensorTractScaleOnly
    in_memory = load_checkpoint(folder, weights="q4_0", embeddings="q4_0", device_map=None)
    assert isinstance(in_memory.lm_head.weight, QTensorTractScaleOnly)
    assert torch.equal(logits(model), logits(in_memory))
    by_config = load_checkpoint(folder, config=T2NConfig(embeddings="q4_0"))
    assert torch.equal(logits(model), logits(by_config))


def test_a_packed_checkpoint_is_taken_as_it_is(tmp_path):
    packed = load_checkpoint(models.saved(models.m1(), tmp_path), weights="q4_0")
    folder = models.saved(packed, tmp_path)
    assert torch.equal(logits(load_checkpoint(folder)), logits(packed))
    with pytest.raises(ConfigError, match="quantized already"):
        load_checkpoint(folder, weights="q4_0")


def test_limits_place_weights(tmp_path):
    folder = models.saved(models.m2(num_hidden_layers=8), tmp_path)
    model = load_checkpoint(folder, device_map="auto", max_memory={"cpu": 400_000})
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}


def test_a_task_chooses_the_head(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    assert isinstance(load_checkpoint(folder, task="feature-extraction"), hf.LlamaModel)
    with pytest.raises(ConfigError, match=r"poetry.*text-generation"):
        load_checkpoint(folder, task="poetry")


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_model_whose_package_is_missing_is_refused_with_what_to_install(tmp_path):
    config = hf.TimmWrapperConfig(architecture="resnet18", architectures=["TimmWrapperForImageClassification"])
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: .*pip install timm$"):
        load_checkpoint(tmp_path)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json"):
        load_checkpoint(tmp_path)
    folder = models.saved(models.m1(), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        load_checkpoint(folder)


@pytest.mark.parametrize("cut", [1, 5000], ids=["tail", "middle"])
def test_a_truncated_file_is_named(cut, tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(StorageError, match=r"model\.safetensors.*truncated"):
        check_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = models.saved(models.m2(), tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(StorageError, match=shard.name):
        load_checkpoint(folder)


def test_a_file_is_no_model_folder(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="is a file; expected a model folder"):
        load_checkpoint(folder / "config.json")


def test_a_model_may_be_in_a_subfolder(tmp_path):
    source = models.m1()
    source.save_pretrained(tmp_path / "below")
    assert torch.equal(logits(load_checkpoint(tmp_path, subfolder="below")), logits(source))
    with pytest.raises(CheckpointNotFoundError, match="no config"):
        load_checkpoint(tmp_path)


def edited_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_a_checkpoint_that_does_not_fill_the_model_is_refused(tmp_path):
    """transformers draws what is missing at random, and goes on: an export of that would pass every check."""
    folder = edited_config(models.saved(models.m2(), tmp_path), num_hidden_layers=3)
    with pytest.raises(FormatError, match=r"holds no values for model\.layers\.2\..* and 6 more"):
        load_checkpoint(folder, weights="q4_0")
    with pytest.raises(FormatError, match=r"holds no values for classifier.*is task='token-classification'"):
        load_checkpoint(bert(tmp_path), task="token-classification")


def test_features_of_an_encoder_need_no_stored_pooler(tmp_path):
    assert type(load_checkpoint(bert(tmp_path), task="feature-extraction")) is hf.BertModel


def bert(tmp_path):
    options = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.BertConfig(vocab_size=64, hidden_size=32, **options)
    return models.saved(models.build(hf.BertForMaskedLM, config), tmp_path)


def test_shapes_that_are_not_those_of_the_config_are_refused_by_name(tmp_path):
    folder = edited_config(models.saved(models.m2(), tmp_path), intermediate_size=96)
    with pytest.raises(FormatError, match=r"down_proj\.weight has shape \(64, 128\), .* \(64, 96\), and 5 more"):
        load_checkpoint(folder)


def test_a_config_that_is_no_json_is_refused(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(T2NError, match="config"):
        load_checkpoint(folder)
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(FormatError, match="unheard-of"):
        load_checkpoint(folder)


def test_the_weights_of_another_quantizer_are_refused(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'gptq'"):
        load_checkpoint(folder)


def test_a_name_that_is_neither_folder_nor_repository_is_refused(monkeypatch):
    # The variable HF_HUB_OFFLINE was read long ago; nobody is to be asked, which may take a minute.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFoundError, match="neither a model folder nor a repository"):
        load_checkpoint("nobody/nothing-of-this-name")
    with pytest.raises(CheckpointNotFoundError, match="neither a model folder nor a repository"):
        checkpoint_folder("nobody/nothing-of-this-name")


def test_a_folder_is_its_own_local_folder(tmp_path):
    assert checkpoint_folder(tmp_path) == tmp_path


def test_threads_that_load_at_once_get_the_same_model(tmp_path):
    source = models.m1()  # with tied weights
    folder, ids = models.saved(source, tmp_path), models.prompt()
    with torch.no_grad():
        expected = source(ids).logits
    with ThreadPoolExecutor(3) as threads:
        loaded = [threads.submit(load_checkpoint, folder) for _ in range(9)]
        loaded = [model.result() for model in loaded]
    with torch.no_grad():
        assert all(torch.equal(model(ids).logits, expected) for model in loaded)


MEASURE = """
import sys, time, torch
torch.set_num_threads(1)
import t2n_hf, transformers
from t2n_hf.hf.loading import load_checkpoint
transformers.LlamaForCausalLM

def kibibytes(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

load_checkpoint(sys.argv[2])  # what is imported on first use
before = kibibytes("VmHWM")
start = time.process_time()
weights, dtype = [*sys.argv[3:], "none", "auto"][:2] if len(sys.argv) != 4 else [sys.argv[3], "auto"]
model = load_checkpoint(sys.argv[1], weights=weights, dtype=dtype)
print(time.process_time() - start, kibibytes("VmHWM") - before, sum(p.nbytes for p in model.parameters()) // 1024)
"""


def measure(*arguments):
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    return [float(n) for n in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.model
def test_a_real_checkpoint_is_opened_quickly_and_takes_no_memory(smollm2, tmp_path):
    seconds, grown, total = measure(smollm2, models.saved(models.m1(), tmp_path))
    assert total > 500_000
    assert grown < 40_000
    assert seconds < 5  # 0.6 on a quiet machine


def test_loading_a_sharded_model_takes_two_tensors_of_memory(tmp_path):
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
    folder = models.saved(models.m2(**shape), tmp_path, max_shard_size="5MB")
    assert len(list(folder.glob("*.safetensors"))) > 20
    largest = 4096 * 1024 * 4 // 1024
    small = models.saved(models.m1(), tmp_path)
    _, grown, total = measure(folder, small)
    assert total > 160_000
    assert grown < 2 * largest
    _, grown, _ = measure(folder, small, "q4_0")
    assert grown < 2 * largest + 20_000  # the packed weights that are spilled pass through memory
    _, grown, _ = measure(folder, small, "none", "bfloat16")
    assert grown < 2 * largest + 8_000  # each weight is cast on its way, and read again when it is needed
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task": "fill-mask"}, "LlamaConfig.*AutoModelForMaskedLM"),
        ({"device_map": "nowhere"}, "found nowhere"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "much is not in a valid format"),
    ],
    ids=["task", "device_map", "max_memory"],
)
def test_what_transformers_refuses_is_an_error_of_ours(tmp_path, options, text):
    folder = models.saved(models.m1(), tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be loaded like this.*{text}"):
        load_checkpoint(folder, **options)
