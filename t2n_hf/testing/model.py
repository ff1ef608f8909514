"""What is asked of a model whose weights are quantized to one class."""
# ruff: noqa: D102 - names of tests are sentences

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from t2n_hf.contract import Tag, WeightFormat
from t2n_hf.hf.config import T2NConfig
from t2n_hf.tensor.offload import OffloadedTensor

__all__ = ["ModelConformance"]


class ModelConformance:
    """Tests of one class in a small Llama: loads, offloads, generates, saves and reloads, by `T2NConfig`."""

    weight_format: ClassVar[type[WeightFormat]]

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """A saved Llama of random weights, untied."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
        transformers.LlamaForCausalLM(config).eval().save_pretrained(tmp_path / "float")
        return tmp_path / "float"

    def load(self, folder: Path, **options: Any) -> Any:  # noqa: ANN401 - what from_pretrained takes and gives
        """Load a checkpoint with the class."""
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def config(self) -> T2NConfig:
        """The options that name the class."""
        return T2NConfig(weights=self.weight_format.OFFLOAD_STATE_TAG)

    def test_a_model_loads_offloads_generates_saves_and_reloads(self, checkpoint: Path, tmp_path: Path) -> None:
        ids = torch.arange(3, 12)[None]
        model = self.load(checkpoint, quantization_config=self.config())
        weight = model.model.layers[1].mlp.down_proj.weight
        assert type(weight) is self.weight_format
        with torch.no_grad():
            expected = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)

        model.save_pretrained(tmp_path / "saved")
        again = self.load(tmp_path / "saved")
        assert type(again.model.layers[1].mlp.down_proj.weight) is self.weight_format
        on_disk = self.load(checkpoint, quantization_config=self.config(), device_map={"": "disk"})
        assert isinstance(on_disk.model.layers[1].mlp.down_proj.weight, OffloadedTensor)
        for other in (again, on_disk):
            with torch.no_grad():
                assert torch.equal(other(ids).logits, expected)
            assert torch.equal(other.generate(ids, max_new_tokens=5, do_sample=False), tokens)

    def test_saved_twice_the_bytes_are_the_same(self, checkpoint: Path, tmp_path: Path) -> None:
        self.load(checkpoint, quantization_config=self.config()).save_pretrained(tmp_path / "first")
        for number, options in enumerate(({}, {"device_map": {"": "disk"}})):
            self.load(tmp_path / "first", **options).save_pretrained(tmp_path / f"second{number}")
            for file in (tmp_path / "first").iterdir():
                assert (tmp_path / f"second{number}" / file.name).read_bytes() == file.read_bytes()

    def test_embeddings_and_head_can_be_of_the_class(self, checkpoint: Path) -> None:
        tag = self.weight_format.OFFLOAD_STATE_TAG
        config = T2NConfig(tag, embeddings=tag, lm_head=tag)
        ids = torch.arange(3, 12)[None]
        model = self.load(checkpoint, quantization_config=config)
        on_disk = self.load(checkpoint, quantization_config=config, device_map={"": "disk"})
        assert type(model.get_input_embeddings().weight) is self.weight_format
        assert type(model.get_output_embeddings().weight) is self.weight_format
        with torch.no_grad():
            assert torch.equal(model(ids).logits, on_disk(ids).logits)

    def test_the_report_says_what_each_weight_is(self, checkpoint: Path) -> None:
        model = self.load(checkpoint, quantization_config=self.config())
        report = model.t2n_report()
        short = Tag.parse(self.weight_format.OFFLOAD_STATE_TAG).short
        packed = {row.name: row for row in report.rows if row.quantized}
        assert report.by_format()[short][0] == len(packed) == 14
        for name, row in packed.items():
            assert row.nbytes == self.weight_format.packed_nbytes(row.shape) == model.get_parameter(name).opaque_nbytes
            assert row.relative_error is None or 0 < row.relative_error < 1

    @pytest.mark.filterwarnings("ignore:only .* of the values that could be quantized")
    def test_what_the_class_refuses_stays_float_with_its_reason(self, checkpoint: Path, tmp_path: Path) -> None:
        config = transformers.LlamaConfig.from_pretrained(checkpoint, hidden_size=48, intermediate_size=80)
        source = transformers.LlamaForCausalLM(config)
        source.save_pretrained(tmp_path / "narrow")
        model = self.load(tmp_path / "narrow", quantization_config=self.config())
        rows = {row.name: row for row in model.t2n_report().rows}
        for name, parameter in source.named_parameters():
            if name.endswith("_proj.weight"):
                reason = self.weight_format.refuses(tuple(parameter.shape), parameter.dtype)
                assert (rows[name].quantized, rows[name].reason) == (reason is None, reason or "")
        with torch.no_grad():
            assert bool(torch.isfinite(model(torch.arange(3, 12)[None]).logits).all())
