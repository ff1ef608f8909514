"""Int8Rows passes the conformance suite, and exports dense or as Q4_0."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from t2n_hf_int8 import Int8Rows

from t2n_hf import T2NConfig
from t2n_hf.export.exporter import export_nnef
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.testing import ModelConformance, WeightFormatConformance

torch.set_num_threads(1)


class TestInt8Rows(WeightFormatConformance):
    weight_format = Int8Rows
    max_relative_error = 0.01


class TestModelsOfInt8Rows(ModelConformance):
    weight_format = Int8Rows


def test_values_are_those_of_numpy():
    w = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    scale = np.abs(w.numpy()).max(axis=1, keepdims=True) / np.float32(127)
    expected = np.round(w.numpy() / scale).astype(np.int8) * scale
    np.testing.assert_array_equal(Int8Rows.quantize(w).to_base_tensor().numpy(), expected)


def test_a_fresh_process_finds_the_class_without_an_import():
    program = (
        "import sys; from t2n_hf.registry import format_class, installed_tags\n"
        "assert 't2n_hf_int8.int8_rows.v1' in installed_tags()\n"
        "assert 't2n_hf_int8' not in sys.modules\n"
        "assert format_class('int8_rows').__name__ == 'Int8Rows'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_distribution_declares_one_tag():
    points = importlib.metadata.distribution("t2n-hf-int8").entry_points
    assert [(p.group, p.name) for p in points] == [("t2n_hf.offload_state", "t2n_hf_int8.int8_rows.v1")]


def llama(folder: Path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    options = T2NConfig(weights="int8_rows")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=options).eval()


@pytest.mark.parametrize("weights", [None, "q4_0"], ids=["dense", "q4_0"])
def test_a_model_exports(tmp_path, weights):
    report = export_nnef(llama(tmp_path / "model"), tmp_path / "out", check=False, weights=weights)
    reader = ArchiveReader(report.archive)
    formats = {reader.header(name.removesuffix(".dat")).format for name in reader.names() if name.endswith(".dat")}
    assert ("q4_0" in formats) == (weights == "q4_0")
