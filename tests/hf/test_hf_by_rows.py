"""Embeddings that are only gathered keep their blocks in a fast model; tied ones, which are multiplied, do not."""

import models
import pytest
import torch
import transformers as hf

from t2n_hf import T2NConfig
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant.kernels import int4_kernel

pytestmark = pytest.mark.skipif(int4_kernel() is None, reason="no int4 kernel on this machine")


def load(folder, compute, **options):
    config = T2NConfig("q4_0", embeddings="q4_0", lm_head="q4_0", compute=compute)
    return hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, **options
    ).eval()


@pytest.mark.parametrize("compute", ["fast", "compiled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_table_that_is_only_gathered_keeps_its_blocks(tied, compute, tmp_path):
    config = hf.LlamaConfig(**{**models.SHAPE, "tie_word_embeddings": tied})
    source = models.saved(hf.LlamaForCausalLM(config), tmp_path)
    model = load(source, compute)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    expected = QTensorTractScaleOnly.resident_nbytes(table.shape, compute if tied else "exact")
    with torch.no_grad():
        model(torch.arange(7).unsqueeze(0))
    assert table.opaque_nbytes == expected
    assert table.compute == (compute if tied else "exact")
    assert head.compute == compute
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", compute)
    assert again.get_input_embeddings().weight.opaque_nbytes == expected
    assert again.get_output_embeddings().weight.compute == compute
    assert torch.equal(again.get_input_embeddings().weight.to_base_tensor(), table.to_base_tensor())
