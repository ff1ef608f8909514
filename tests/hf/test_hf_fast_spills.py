"""A fast weight on disk lies there in its kernel's layout: it is packed while it is loaded, once, and never again."""

import models
import pytest
import torch
import transformers as hf

from t2n_hf import T2NConfig
from t2n_hf.tensor.opaque import materialised_counts
from t2n_hf.tensor.quant.kernels import TorchInt4Kernel, int4_kernel

pytestmark = pytest.mark.skipif(int4_kernel() is None, reason="no int4 kernel on this machine")


def load(folder, **options):
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


@pytest.mark.parametrize("stored", ["plain", "quantized"])
@pytest.mark.parametrize("compute", ["fast", "compiled"])
def test_generating_from_disk_repacks_nothing(stored, compute, tmp_path, monkeypatch):
    source = models.saved(models.m1(), tmp_path)
    config = T2NConfig("q4_0", embeddings="q4_0", compute=compute, spill_dir=tmp_path)
    if stored == "quantized":
        load(source, quantization_config=T2NConfig("q4_0", embeddings="q4_0")).save_pretrained(tmp_path / "packed")
        source = tmp_path / "packed"
    packed = []
    pack = TorchInt4Kernel.pack
    monkeypatch.setattr(TorchInt4Kernel, "pack", lambda kernel, blocks: packed.append(blocks) or pack(kernel, blocks))
    model = load(source, device_map={"": "disk"}, quantization_config=config)
    matrices = {id(p) for p in model.parameters() if p.ndim == 2}
    assert len(packed) == len(matrices)
    counts = materialised_counts()
    ids = torch.arange(5).unsqueeze(0)
    expected = load(source, quantization_config=config).generate(ids, max_new_tokens=6, do_sample=False)
    packed.clear()
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert packed == []
    assert materialised_counts() == counts
